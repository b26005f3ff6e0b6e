import os
import sys

for descriptor in range(3, 100):
    try:
        os.write(descriptor, b'{"fault": "x"}')
    except OSError:
        pass
print('{"fault": "SETUP-FAIL"}', file=sys.stderr)
os._exit(99)
