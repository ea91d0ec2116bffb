"""`python -m rftcli` is `rft`."""

from rftcli.cli.main import main

main()
