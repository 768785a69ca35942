"""What TensorFlow writes to stderr on its own account."""

import re

# absl's lines, as "I0102 03:04:05.678901  123 port.cc:153] …"; one of them goes on in a second line
LINES = re.compile(
    r"^(WARNING: All log messages before absl::.*"
    r"|[IWE]\d{4} [\d:.]+ +\d+ \S+\.(cc|h):\d+\] .*"
    r"|To enable the following instructions: .*)\n",
    re.M,
)


def without_tensorflow_log(stderr: str) -> str:
    """The rest. It logs before TF_CPP_MIN_LOG_LEVEL is looked at, hence cannot be told to be silent."""
    return LINES.sub("", stderr)
