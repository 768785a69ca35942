"""The messages that TensorFlow itself writes to stderr."""

import re

# absl's lines, as "I0102 03:04:05.678901  123 port.cc:153] …"; one of them continues in a second line
LINES = re.compile(
    r"^(WARNING: All log messages before absl::.*"
    r"|[IWE]\d{4} [\d:.]+ +\d+ \S+\.(cc|h):\d+\] .*"
    r"|To enable the following instructions: .*)\n",
    re.M,
)


def without_tensorflow_log(stderr: str) -> str:
    """The rest of stderr. TensorFlow logs before it reads TF_CPP_MIN_LOG_LEVEL: this cannot be disabled."""
    return LINES.sub("", stderr)
