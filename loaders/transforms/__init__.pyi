from .contract import (
    IMAGENET_MEAN as IMAGENET_MEAN,
    IMAGENET_STD as IMAGENET_STD,
    ArraySpec as ArraySpec,
    Transform as Transform,
    TransformInput as TransformInput,
)
from .decode import decode_rgb as decode_rgb
from .transforms import (
    ColorJitter as ColorJitter,
    Cut as Cut,
    EvalTransform as EvalTransform,
    TrainTransform as TrainTransform,
)
from .views import Views as Views
