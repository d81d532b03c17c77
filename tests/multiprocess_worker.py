"""One of several processes that train together: test_multiprocess.py starts them.

    python tests/multiprocess_worker.py PORT NUM_PROCESSES ORDER_JSON LATE MAY_GO_ON PROCESS_ID WORKDIR CONFIG RECORD

ORDER_JSON lists the devices in the order in which the mesh takes them. LATE is how many seconds the last process takes
longer to compile. Behind its first batch each process waits for the file MAY_GO_ON. RECORD is a file that gets one line
of JSON per step, the example ids that this process loads, and then the outcome.
"""

import json
import pathlib
import sys
import time

import jax

from mod_jax import host


def main() -> None:
    host.prepare()
    port, num_processes, order, late, may_go_on, process_id, workdir, changes, record = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", int(num_processes), int(process_id))

    from mod_jax import sharding
    from mod_jax.config import make_config
    from mod_jax.training import loop

    put_batch, make_mesh, compile_step = loop.put_batch, sharding.make_mesh, loop.compile_step
    sharding.make_mesh = lambda config: make_mesh(config, [jax.devices()[i] for i in json.loads(order)])
    with open(record, "w") as file:

        def put(run, batch):
            print(json.dumps(batch["example_ids_B"].tolist()), file=file, flush=True)
            while not pathlib.Path(may_go_on).exists():
                time.sleep(0.02)
            return put_batch(run, batch)

        def compile_late(run):
            if int(process_id) == int(num_processes) - 1:
                time.sleep(float(late))
            return compile_step(run)

        loop.put_batch, loop.compile_step = put, compile_late
        outcome = loop.train(make_config(**json.loads(changes)), workdir)
        print(json.dumps(outcome.value), file=file)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
