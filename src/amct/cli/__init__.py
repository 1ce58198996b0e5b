"""The ``amct`` command: thin; every sub-command is a call into the packages below."""
