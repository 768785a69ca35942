"""Key pairs of a training machine, of data machines that it allows, and of one that it does not."""

from pathlib import Path

from shardprep.loaders.machines.keys import ReceiverKeys, SenderKeys, make_keys


class KeyFolder:
    """The keys ``train``, ``data1`` and ``data2``, which are allowed, and ``stranger``, which is not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.allowed = folder / "allowed"
        self.allowed.mkdir(mode=0o700)
        for name in ("train", "data1", "data2", "stranger"):
            make_keys(folder / name)
        for name in ("data1", "data2"):
            self.allow(name)

    def allow(self, name: str) -> None:
        """Copy a public key into the allow-list."""
        (self.allowed / f"{name}.key").write_bytes((self.folder / f"{name}.key").read_bytes())

    def disallow(self, name: str) -> None:
        (self.allowed / f"{name}.key").unlink()

    @property
    def receiver(self) -> ReceiverKeys:
        return ReceiverKeys(self.folder / "train.key_secret", self.allowed)

    def sender(self, name: str = "data1", *, receiver: str = "train") -> SenderKeys:
        return SenderKeys(self.folder / f"{name}.key_secret", self.folder / f"{receiver}.key")
