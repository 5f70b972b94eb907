"""Prints the last collectives that each rank has called: python last_calls.py /tmp/flight_*

The files are those that PyTorch's FlightRecorder writes when a group fails (TORCH_FR_DUMP_TEMP_FILE).
"""

import pickle
import sys
from pathlib import Path

for file in sorted(sys.argv[1:]):
    print(Path(file).name)
    for entry in pickle.loads(Path(file).read_bytes())["entries"][-3:]:
        lines = [frame for frame in entry["frames"] if "/site-packages/" not in frame["filename"]]
        where = f"{Path(lines[0]['filename']).name}:{lines[0]['line']}" if lines else "?"
        group = entry["process_group"][0]
        print(f"  {entry['profiling_name']:16} {entry['state']:10} group {group}, called at {where}")
