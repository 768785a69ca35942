"""Options, messages and progress bars shared by all commands."""
