"""What HDFS's client says went wrong, as our errors: to be tried again, or not."""

from __future__ import annotations

import getpass
import os
import re

from broker.errors import StorageError, StoreUnavailable

# What the name node says, as the client shows it: its class without the package, and the message.
_RPC_ERROR = re.compile(r'.*RPCError\("(?:[\w$]+\.)*([\w$]+)", "(.*?)"?\)?')
_NO_LOGIN = ("sasl", "gssapi", "kerberos")
# What the client says, and what the name node says.
_NO_DATANODE = ("All DataNodes failed", "could only be written to 0 of")


def translate(error: Exception, address: str) -> StorageError:
    """Turn the client's error into ours: what, where, and what to do."""
    if isinstance(error, StorageError):
        return error
    # The name node sends its stack along, in which lines end as they do in Java and in Rust.
    text = str(error).partition("\n")[0].partition("\\n")[0].strip()
    said = _RPC_ERROR.fullmatch(text)
    text = text if said is None else f"{said[1]}: {said[2]}".replace('\\"', '"')
    if "is not a directory" in text or "ParentNotDirectory" in text:
        return StorageError(f"{address}: a file stands where a folder should: {text}")
    if isinstance(error, PermissionError) or "AccessControlException" in text:
        return StorageError(
            f"not allowed to write or read {address} as {_user()}: {text}; check its owner, or "
            "set HADOOP_USER_NAME"
        )
    if "SafeMode" in text:
        return StoreUnavailable(f"{address}: the name node is in safe mode; waiting for it")
    if any(sign in text for sign in _NO_DATANODE):
        return StoreUnavailable(
            f"{address}: the name node answers, but no datanode does that could hold or take this; "
            f"start the datanodes: {text}"
        )
    # But for paths, which may have any word in them.
    words = re.sub(r"\S*/\S*", "", text).lower()
    if any(sign in words for sign in _NO_LOGIN):
        return StorageError(
            f"{address}: HDFS does not take {_user()}'s login: {text}; check the Kerberos ticket "
            "(kinit), or the options storage.kerberos_principal and storage.kerberos_keytab"
        )
    return StoreUnavailable(f"{address}: HDFS does not answer: {text}")


def _user() -> str:
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
