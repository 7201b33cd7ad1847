"""What lets whoever holds a URL in: signatures, tokens, keys. None of it is written anywhere."""

import re

# Of presigned URLs (S3, Google), shared access signatures (Azure), and what else goes by such a name. Dates of expiry
# go too: the same object under a fresh signature is the same input.
_SECRET = re.compile(
    r"([?&#])(?:x-amz-[\w-]+|x-goog-[\w-]+|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id|key|code|"
    r"sig|s[etpvrs]|srt|spr|sip|sk[a-z]+|(?:[\w-]*(?:token|secret|passw|credential|api[-_]?key|auth)[\w-]*))"
    r"=[^&\s'\"<>\\]*",  # in a line of JSON a backslash escapes what follows the value
    re.IGNORECASE,
)
# A user and a password, which may hold slashes, as secrets of AWS do; a port is no password, but on S3 there is none,
# and "arn" is no user there. As long as they get, lest a long text is searched to its end from each of its places.
_USER = re.compile(
    r"(s3a?://|://(?=[^/\s@'\"\[]{0,256}:(?!\d+(?:[/?#,;|)\]]|$))))(?!arn:)[^/\s@'\"\[]{0,256}:[^\s@'\"]{1,512}@|"
    r"(https?://)[^/\s@:'\"\[]{1,512}@"  # a user alone, which may be a token
)
_CUT = "\0"


def redacted(text: str) -> str:
    """A URL, or a text with URLs in it, less what is secret in them; anything else as it is."""
    if "://" not in text:
        return text
    text = _USER.sub(r"\1\2", text)
    while (shorter := _SECRET.sub(lambda found: found[1] + _CUT, text)) != text:
        text = shorter
    # "?CUT&CUT&name=value" leaves "?name=value"
    return re.sub(r"[?&#]\0", "", re.sub(r"([?&#])(?:\0&)+", r"\1", text))
