from .bench import measure as measure
from .progress_bar import tracing as tracing, watched as watched
