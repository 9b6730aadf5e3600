"""python -m beam_llm.simulator"""

import sys

from beam_llm.simulator import main

sys.exit(main())
