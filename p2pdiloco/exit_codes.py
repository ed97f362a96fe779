"""What a command ends with, as docs/exit-codes.md says it for people. Every code has its name here."""

DONE = 0
NO = 1  # the command worked, and the answer is no
USAGE = 2  # the command line
FILES = 3  # configuration or files
NETWORK = 4
RUN = 5  # the wrong run, one that is over, or of another version
RESOURCES = 6  # disk, memory, port, device
OURS = 70  # a fault of this program
INTERRUPTED = 130  # Ctrl-C
