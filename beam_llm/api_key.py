"""Where the API key comes from: an environment variable or Secret Manager, read on the worker, never pickled."""

from __future__ import annotations

import os

from beam_llm.errors import ConfigError


def read_api_key(api_key_env: str | None, api_key_secret: str | None = None) -> str | None:
    """The key, without outer white space; None if there is none.

    Args:
        api_key_env: Name of an environment variable; None or one that is not set: no key.
        api_key_secret: `projects/P/secrets/S/versions/V` in Google Secret Manager, or a secret as Beam writes it
            (`type:GcpSecret;version_name:…`); goes before the variable. None: the variable alone.

    Raises:
        ConfigError: The secret cannot be read, or the key holds a character that no header can carry.
    """
    if api_key_secret is not None:
        return _clean(_read_secret(api_key_secret), f"secret {api_key_secret}")
    return _clean(os.environ.get(api_key_env, ""), f"${api_key_env}") if api_key_env else None


def _read_secret(reference: str) -> str:
    from apache_beam.utils.secret import Secret  # Beam is not needed for a key from the environment

    form = reference if reference.startswith("type:") else f"type:GcpSecret;version_name:{reference}"
    try:
        return str(Secret.parse_secret_option(form).get_str())
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"api_key_secret={reference}: {error}; expected projects/P/secrets/S/versions/V that this process may read"
        ) from error


def _clean(text: str, where: str) -> str | None:
    key = text.strip()
    if not key:
        return None
    if any(ord(c) < 32 or ord(c) in range(127, 161) or ord(c) > 255 for c in key):
        raise ConfigError(
            f"the key in {where} has a line end or another character that no HTTP header can carry; set it again"
        )
    return key
