import sys

sys.exit("reason")
