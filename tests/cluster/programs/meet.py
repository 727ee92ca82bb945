"""One rank under `hpcddp exec`: all meet at MASTER_ADDR and MASTER_PORT; rank 0 prints who came, and from where."""

import os
import socket
import time

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
card = f"{rank}@{socket.gethostname()}"
if rank == 0:
    guests = [card]
    with socket.create_server(("::", address[1]), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        server.settimeout(600)
        while len(guests) < size:
            guest, _ = server.accept()
            with guest:
                guests.append(guest.recv(99).decode())
    print("met:", *sorted(guests), flush=True)
else:
    deadline = time.monotonic() + 600
    while True:
        try:
            with socket.create_connection(address, timeout=600) as door:
                door.sendall(card.encode())
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
