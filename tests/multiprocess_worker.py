"""One of several processes that train together: test_multiprocess.py starts them.

    python tests/multiprocess_worker.py PORT NUM_PROCESSES ORDER_JSON PROCESS_ID WORKDIR CONFIG_JSON RECORD

ORDER_JSON lists the devices in the order in which the mesh takes them. RECORD is a file that gets one line of JSON per
step, the example ids that this process loads, and then the outcome.
"""

import faulthandler
import json
import sys

import jax

from mod_jax import host

SECONDS = 300  # after this, say where every thread is, and leave


def main() -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    host.prepare()
    port, num_processes, order, process_id, workdir, changes, record = sys.argv[1:]
    jax.distributed.initialize(f"localhost:{port}", int(num_processes), int(process_id))

    from mod_jax import sharding
    from mod_jax.config import make_config
    from mod_jax.training import loop

    put_batch, make_mesh = loop.put_batch, sharding.make_mesh
    sharding.make_mesh = lambda config: make_mesh(config, [jax.devices()[i] for i in json.loads(order)])
    with open(record, "w") as file:

        def put(run, batch):
            print(json.dumps(batch["example_ids_B"].tolist()), file=file, flush=True)
            return put_batch(run, batch)

        loop.put_batch = put
        outcome = loop.train(make_config(**json.loads(changes)), workdir)
        print(json.dumps(outcome.value), file=file)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
