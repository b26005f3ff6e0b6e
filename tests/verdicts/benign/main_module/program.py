import sys


def main():
    print(__name__, sys.argv, sys.path[0], __file__)


if __name__ == "__main__":
    main()
