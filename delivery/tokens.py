"""Tokens for OAUTHBEARER: by client credentials, or by the AWS role of this machine.

In: a connection's token endpoint, client id and secret. Out: a token that is valid for at least a fifth of its life.
State: the last token of each connection. On failure: :class:`CredentialsError`, in a sentence without the secret.

Source: RFC 6749, sections 2.3.1, 4.4 and 5.2; for AWS the README of aws-msk-iam-sasl-signer-python.
"""

import asyncio
import importlib
import json
import os
import re
import time
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import quote_plus

from delivery.connection import Connection, CredentialsError
from delivery.proxy import proxy_of
from delivery.redaction import redact

_TIMEOUT_S = 10.0
_FRESH = 0.8  # a token is used again during this part of its life
_LARGEST_BYTES = 64 * 1024
_LIFE_S = 300.0  # a token's life, if the answer does not say it
_AWS_HOST = re.compile(r"\.([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com", re.ASCII)


class Token(NamedTuple):
    """A token, and the time until which it is used again."""

    text: str
    fresh_until_s: float

    def __repr__(self) -> str:
        return f"Token until {self.fresh_until_s:.0f}"


_tokens: dict[Connection, Token] = {}


async def token(connection: Connection) -> str:
    """A token for a connection that is opened now. Raises CredentialsError."""
    cached = _tokens.get(connection)
    if cached is None or time.time() >= cached.fresh_until_s:
        cached = await (_from_aws(connection) if connection.mechanism == "aws-msk-iam" else _from_endpoint(connection))
        _tokens[connection] = cached
    return cached.text


def forget(connection: Connection) -> None:
    """Drop the cached token, which the broker did not accept: the next connection gets a new one."""
    _tokens.pop(connection, None)


async def _from_endpoint(connection: Connection) -> Token:
    """Request a token from the endpoint, with the current client id and secret."""
    import aiohttp  # imported only here, to keep the node producer small

    endpoint, secrets, now_s = str(connection.token_endpoint), connection.secrets(), time.time()
    pair = f"{quote_plus(secrets.oauth_client_id)}:{quote_plus(secrets.oauth_client_secret)}"
    headers = {"Authorization": f"Basic {b64encode(pair.encode()).decode()}", "Accept": "application/json"}
    form = {"grant_type": "client_credentials"} | ({"scope": connection.oauth_scope} if connection.oauth_scope else {})
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.post(
                endpoint,
                data=form,
                headers=headers,
                proxy=proxy_of(endpoint),
                ssl=connection.trust(),
                allow_redirects=False,
            ) as response,
        ):
            content = b""
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > _LARGEST_BYTES:
                    raise ValueError("its answer is too long")
            answer = json.loads(content or b"null")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
        reason = redact(str(error)) or type(error).__name__  # a proxy's URL may have a password
        raise CredentialsError(
            f"no token from {endpoint}: {reason}: is it up, and is this the token endpoint?"
        ) from None
    answer = answer if isinstance(answer, dict) else {}
    if response.status != 200 or not isinstance(answer.get("access_token"), str):
        reason = f"{answer.get('error') or response.reason} {answer.get('error_description') or ''}".strip()
        raise CredentialsError(
            f"no token from {endpoint}: it answers {response.status} ({redact(reason)[:200]}): check"
            " --kafka-oauth-client-id, --kafka-oauth-client-secret-file and --kafka-oauth-scope"
        )
    expires = re.fullmatch(r"[0-9]{1,12}(\.[0-9]*)?", str(answer.get("expires_in")))
    return Token(answer["access_token"], now_s + _FRESH * (float(expires[0]) if expires else _LIFE_S))


async def _from_aws(connection: Connection) -> Token:
    """Sign a request with the credentials that AWS gives this machine or pod; the region is that of the brokers."""
    host = _AWS_HOST.search(connection.servers)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or (host[1] if host else None)
    if region is None:
        raise CredentialsError("aws-msk-iam: the region is not known: set AWS_REGION")
    try:
        signer = importlib.import_module("aws_msk_iam_sasl_signer.MSKAuthTokenProvider")
        text, expires_ms = await asyncio.to_thread(signer.generate_auth_token, region)
    except ImportError:
        raise CredentialsError("aws-msk-iam: run `pip install 'gpustream[msk]'` first") from None
    except Exception as error:  # noqa: BLE001 - botocore's errors have no common base; their text may hold secrets
        raise CredentialsError(f"aws-msk-iam: no AWS credentials for this process ({type(error).__name__})") from None
    now_s = time.time()
    return Token(text, now_s + _FRESH * (expires_ms / 1000 - now_s))
