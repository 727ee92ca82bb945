"""Rule -> training scripts in which it finds its mistake (with the line), and scripts near them that are right."""

from __future__ import annotations

from typing import NamedTuple


class Cases(NamedTuple):
    bad: list[tuple[int, str]]
    good: list[str]


def loop(body: str, before: str = "", after: str = "") -> str:
    """A training loop over epochs and steps; `body` is in each step, from the third line behind `before` on."""
    text = "".join(f"        {line}\n" for line in body.splitlines())
    return f"{before}for epoch in range(9):\n    for x, y in loader:\n{text}{after}"


INIT = "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\nrank = dist.get_rank()\n"
END = "dist.destroy_process_group()\n"
STEP = "loss = criterion(model(x.cuda()), y)\nloss.backward()\n"
DDP = f"{INIT}model = DistributedDataParallel(net)\n"
IMAGES = """\
class Photos(Dataset):
    def __getitem__(self, i):
        return transform(Image.open(self.files[i]))

data = Photos()
"""

RUNTIME = (
    "import hpcddp, torch\nwith hpcddp.runtime() as rt:\n    model, optimizer, data = rt.prepare(net, opt, loader)\n"
    "    for epoch in rt.epochs(9):\n        for x in data:\n"
)
CASES = {
    "A3": Cases(
        [
            (1, "torch.cuda.set_device(rank % torch.cuda.device_count())"),
            (2, "n = torch.cuda.device_count()\ndevice = dist.get_rank() % n"),
        ],
        [
            "torch.cuda.set_device(local_rank % torch.cuda.device_count())",
            "if rank % torch.cuda.device_count() == 0:\n    save()",
            "print('rank %d' % torch.cuda.device_count())",
            "def main(rank):\n    torch.cuda.set_device(rank % torch.cuda.device_count())\nmp.spawn(main)",
        ],
    ),
    "A5": Cases(
        [
            (1, "os.environ['MASTER_PORT'] = '12355'"),
            (2, "port = 29500\nos.environ['MASTER_PORT'] = str(port)"),
            (1, "dist.init_process_group('nccl', init_method='tcp://node1:23456', rank=r, world_size=n)"),
        ],
        [
            "os.environ.setdefault('MASTER_PORT', '29500')",
            "if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = '29500'",
            "os.environ['MASTER_PORT'] = str(free_port())",
            "dist.init_process_group('gloo', init_method='tcp://localhost:23456', rank=0, world_size=1)",
        ],
    ),
    "A6": Cases(
        [(1, "model = torch.nn.DataParallel(model)")],
        [
            "model = DistributedDataParallel(model, device_ids=[0])",
            "model = DDP(model) if several else nn.DataParallel(model)",
        ],
    ),
    "A7": Cases(
        [
            (5, loop(f"{STEP}total += loss.item()")),
            (5, loop(f"{STEP}print(f'step {{i}}: {{loss}}')")),
            (6, loop("with autocast():\n    loss = model(x.cuda())\naccelerator.backward(loss)\nlog(loss.item())")),
        ],
        [
            loop(f"{STEP}if step % 100 == 0:\n    print(loss.item())"),
            loop(STEP, after="    print(loss.item())\n"),  # once in each epoch
            loop(f"{STEP}total += loss.detach()"),
            "for x in test:\n    total += criterion(model(x.cuda()), y).item()",
            "for x in data:\n    loss = f(x)\n    loss.backward()\n    total += loss.item()",  # no GPU anywhere
        ],
    ),
    "A8": Cases(
        [
            (1, "DataLoader(ImageFolder(path), batch_size=64)"),
            (6, f"{IMAGES}DataLoader(data, batch_size=64)"),
        ],
        [
            f"{IMAGES}DataLoader(data, batch_size=64, num_workers=8)",
            f"{IMAGES}DataLoader(data, **options)",
            f"{IMAGES}DataLoader(TensorDataset(x, y), batch_size=64)",
        ],
    ),
    "A9": Cases(
        [
            (1, "os.environ['MASTER_ADDR'] = 'localhost'"),
            (2, "def setup(rank):\n    os.environ['MASTER_ADDR'] = '10.0.0.7'"),
            (1, "dist.init_process_group('nccl', init_method=f'tcp://127.0.0.1:{port}', rank=r, world_size=n)"),
        ],
        [
            "os.environ.setdefault('MASTER_ADDR', 'localhost')",
            "os.environ['MASTER_ADDR'] = first_host()",
            "if world_size == 1:\n    os.environ['MASTER_ADDR'] = 'localhost'",
            "try:\n    a = os.environ['MASTER_ADDR']\nexcept KeyError:\n    os.environ['MASTER_ADDR'] = 'localhost'",
        ],
    ),
    "A10": Cases(
        [
            (2, "rank = dist.get_rank()\ntorch.cuda.set_device(rank)"),
            (2, "rank = dist.get_rank()\nmodel.to(f'cuda:{rank}')"),
            (2, "accelerator = Accelerator()\ntorch.cuda.set_device(accelerator.process_index)"),
            (2, "rank = int(os.environ['SLURM_PROCID'])\nmodel = DDP(net.to(rank))"),
            (
                4,
                "class Trainer:\n    def __init__(self, model):\n        self.gpu_id = dist.get_rank()\n"
                "        torch.cuda.set_device(self.gpu_id)\n",
            ),
            (2, "rank = dist.get_rank()\nos.environ['CUDA_VISIBLE_DEVICES'] = str(rank)"),
        ],
        [
            "torch.cuda.set_device(accelerator.local_process_index)",
            "rank = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(rank)",
            "def setup():\n    rank = dist.get_rank()\n    rank = rank % 4\n    torch.cuda.set_device(rank)",
            "rank = int(os.environ['LOCAL_RANK'])\nos.environ['CUDA_VISIBLE_DEVICES'] = str(rank)\nx.cuda(rank)",
        ],
    ),
    "A11": Cases(
        [
            (1, loop(STEP, "sampler = DistributedSampler(data)\n")),
            (1, loop(STEP, "loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=True))\n")),
        ],
        [
            loop(STEP, "sampler = DistributedSampler(data)\n", "    sampler.set_epoch(epoch)\n"),
            loop(STEP, "test_sampler = DistributedSampler(data)\n"),
            loop(STEP, "sampler = DistributedSampler(data, shuffle=False)\n"),
            loop(STEP, "import accelerate\nsampler = DistributedSampler(data)\n"),
            "sampler = DistributedSampler(data)\nfor x in loader:\n    model(x).backward()",  # one epoch
            "sampler = DistributedSampler(data)",  # the loop is elsewhere
        ],
    ),
    "A14": Cases(
        [
            (6, loop(STEP, f"{DDP}data = MNIST('d')\nloader = DataLoader(data, 64, shuffle=True)\n", END)),
            (
                3,
                loop(STEP, "fully_shard(model)\ndata = MNIST('d')\nloader = DataLoader(data, 64, shuffle=True)\n", END),
            ),
        ],
        [
            loop(
                STEP,
                f"{DDP}data = MNIST('d')\nloader = DataLoader(data, sampler=DistributedSampler(data))\n",
                f"    loader.sampler.set_epoch(epoch)\n{END}",
            ),
            loop(STEP, f"{DDP}data = FakeData()\nloader = DataLoader(data, 64, shuffle=True)\n", END),
            loop(STEP, f"{DDP}data = Subset(all, mine)\nloader = DataLoader(data, 64, shuffle=True)\n", END),
            loop(STEP, f"{DDP}test = MNIST('d')\ntest_loader = DataLoader(test, 64, shuffle=True)\n", END),
            loop(STEP, "data = MNIST('d')\nloader = DataLoader(data, 64, shuffle=True)\n"),
        ],
    ),
    "A15": Cases(
        [
            (9, loop(STEP, DDP, f"    torch.save(model.state_dict(), 'last.pt')\n{END}")),
            (6, loop(STEP, f"{DDP}def save(state):\n    torch.save(state, 'c.pt')\n", f"    save(state)\n{END}")),
            (7, f"{RUNTIME}            rt.backward(loss(model(x)))\n        torch.save(model.state_dict(), 'c.pt')\n"),
            (6, f"{DDP}with open('c.pt', 'wb') as file:\n    best and torch.save(model.state_dict(), file)"),
        ],
        [
            loop(STEP, DDP, f"    if rank == 0:\n        torch.save(model.state_dict(), 'last.pt')\n{END}"),
            loop(
                STEP,
                f"{DDP}def save(state):\n    torch.save(state, 'c.pt')\n",
                f"    if rank == 0:\n        save(state)\n{END}",
            ),
            f"{DDP}def save(state):\n    if rank != 0:\n        return\n    torch.save(state, 'c.pt')\nsave(state)",
            f"{DDP}main = rank == 0\nif main and best:\n    torch.save(model.state_dict(), 'best.pt')",
            f"{DDP}path = f'state-{{rank}}.pt'\ntorch.save(model.state_dict(), path)",
            f"{DDP}log = None\nif rank == 0:\n    log = Log()\nif log:\n    torch.save(model.state_dict(), 'c')",
            "torch.save(model.state_dict(), 'last.pt')",
            f"{DDP}def save(state):\n    torch.save(state, 'c.pt')",  # who calls it is not seen
            f"{DDP}torch.save(model.state_dict(), 'c.pt') if rank == 0 else None",
        ],
    ),
    "A17": Cases(
        [
            (1, "opt = torch.optim.AdamW(model.parameters())\nmodel = FSDP(model)"),
            (2, "def main():\n    opt = SGD(model.parameters(), lr=1)\n    fully_shard(model)"),
        ],
        [
            "opt = torch.optim.AdamW(model.parameters())\nmodel = DistributedDataParallel(model)",
            "model = FSDP(model)\nopt = torch.optim.AdamW(model.parameters())",
            "fully_shard(model)\nopt = torch.optim.AdamW(model.parameters())",
            "opt = AdamW(model.parameters())\nmodel = FSDP(model, use_orig_params=True)",
        ],
    ),
    "A18": Cases(
        [(7, loop("loss = net(x)\nloss.backward()", DDP, END))],
        [
            loop("loss = model(x)\nloss.backward()", DDP, END),
            loop("loss = model(x)\nloss.backward()\nwith torch.no_grad():\n    net(x)", DDP, END),
            loop("loss = net(x)\nloss.backward()", f"{DDP}net = model\n", END),
            loop("loss = model(x)\nloss.backward()", DDP, f"net(x)\n{END}"),
        ],
    ),
    "A20": Cases(
        [
            (2, "if __name__ == '__main__':\n    mp.spawn(main, nprocs=torch.cuda.device_count())"),
            (1, "notebook_launcher(main, num_processes=4)"),
            (3, "def f(i):\n    dist.init_process_group('nccl')\nmp.Process(target=f, args=[0]).start()"),
            (1, "subprocess.run(['torchrun', '--nproc-per-node', '4', 'train.py'])"),
        ],
        [
            "if args.multiprocessing_distributed:\n    mp.spawn(main, nprocs=4)\nelse:\n    main(0)",
            f"def read(i):\n    pass\n{INIT}mp.Process(target=read).start()",
            "subprocess.run(['nvidia-smi'])",
            "logging.info('start me with torchrun')",
        ],
    ),
    "A22": Cases(
        [
            (5, f"{INIT}if rank == 0:\n    dist.barrier()"),
            (6, f"{INIT}if dist.get_rank() == 0 and verbose:\n    x = f()\n    dist.all_reduce(x)"),
            (7, f"{INIT}def f(x):\n    if rank != 0:\n        return\n    dist.broadcast(x, 0)"),
        ],
        [
            f"{INIT}if rank == 0:\n    f()\ndist.barrier()",
            f"{INIT}if rank == 0:\n    f()\n    dist.barrier()\nelse:\n    dist.barrier()",
            f"{INIT}if rank != 0:\n    dist.barrier()\nf()\nif rank == 0:\n    dist.barrier()",
            f"{INIT}if rank != -1:\n    dist.barrier()",
            f"{INIT}if rank == 0:\n    dist.barrier(group=first_two)",
        ],
    ),
    "A29": Cases(
        [
            (1, f"os.environ['MASTER_PORT'] = str(random.randint(20000, 30000))\n{INIT}"),
            (1, f"os.environ['MASTER_PORT'] = str(find_free_port())\n{INIT}"),
            (2, f"port = find_free_port()\nos.environ['MASTER_PORT'] = str(port)\n{INIT}"),
            (1, "dist.init_process_group('nccl', init_method=f'tcp://{host}:{random.randint(2000, 3000)}', rank=r)"),
        ],
        [
            f"port = comm.bcast(free_port() if rank == 0 else None)\nos.environ['MASTER_PORT'] = str(port)\n{INIT}",
            "dist.init_process_group('gloo', init_method=f'tcp://localhost:{free_port()}', rank=0, world_size=1)",
            "dist.init_process_group('nccl', init_method=f'tcp://{host}:{port}', rank=r, world_size=n)",
            f"os.environ.setdefault('MASTER_PORT', str(random.randint(20000, 30000)))\n{INIT}",
            f"if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = str(find_free_port())\n{INIT}",
            "os.environ['MASTER_PORT'] = str(find_free_port())\nmp.spawn(main)",
        ],
    ),
}
