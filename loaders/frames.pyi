from .machines.codec import FrameDamaged as FrameDamaged, read_head as read_head, unpack_batch as unpack_batch
from .machines.frames import FrameReceiver as FrameReceiver, send_batches as send_batches
from .machines.ledger import SenderFailed as SenderFailed
from .machines.link import ReceiverGone as ReceiverGone
