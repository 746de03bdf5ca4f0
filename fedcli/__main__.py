"""`python -m fedcli` is the program `fedcli`."""

from fedcli.cli.app import main

if __name__ == "__main__":
    main()
