from .machines.keys import (
    NotAdmitted as NotAdmitted,
    PlaintextWire as PlaintextWire,
    ReceiverKeys as ReceiverKeys,
    SenderKeys as SenderKeys,
    WrongReceiver as WrongReceiver,
)
from .machines.link import Refused as Refused
from .machines.receive import RemoteSource as RemoteSource
from .machines.reception import RemoteStats as RemoteStats, SenderReport as SenderReport
from .machines.serve import SenderStats as SenderStats, serve as serve
