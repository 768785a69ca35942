"""The sub-commands of ``prep`` that make something to try the others on."""
