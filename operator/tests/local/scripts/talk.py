"""A job that does not use flyer.job: it prints lines at intervals."""

import argparse
import time

parser = argparse.ArgumentParser()
parser.add_argument("--lines", type=int)
parser.add_argument("--folder")
args = parser.parse_args()
for number in range(args.lines):
    print(f"line {number}", flush=True)
    time.sleep(0.05)
