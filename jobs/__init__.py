"""What a person or a scheduler starts."""

import os

# Some containers run as a user that has none, and there are libraries that cannot be imported then.
if os.path.expanduser("~") == "~":
    os.environ["HOME"] = "/"
