/* Rank 1 ends during an operation; the other ranks get an error that names it and reconfigure. */
#include <hfreduce.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WAIT 60.0
#define COUNT (1 << 20)

/* With ranks 0 and 2. */
static int go_on(hfr_comm *comm)
{
    const uint32_t survivors[] = { 0, 2 };
    hfr_comm *next = NULL;
    int32_t one = 1;
    int right = hfr_reconfigure(comm, survivors, 2, WAIT, &next) == HFR_OK
                && hfr_allreduce(next, &one, 1, HFR_INT32, HFR_SUM, WAIT, NULL) == HFR_OK && one == 2;

    return hfr_close(next, 5.0) == HFR_OK && right;
}

int main(int argc, char **argv)
{
    static float vector[COUNT];
    hfr_comm *comm = NULL;
    hfr_error error = { .size = sizeof error };
    hfr_options options = HFR_OPTIONS_INIT;
    char node[16];
    hfr_status status = HFR_OK;

    if (argc != 4)
        return EXIT_FAILURE;
    options.rank = (uint32_t)atoi(argv[1]);
    options.world_size = (uint32_t)atoi(argv[2]);
    options.rendezvous = argv[3];
    options.key = "a key of sixteen bytes or more";
    options.key_bytes = strlen(options.key);
    snprintf(node, sizeof node, "node%s", argv[1]); /* all talk over TCP: SIGPIPE would kill */
    options.node = node;
    if (hfr_init(&options, &comm) != HFR_OK) {
        fprintf(stderr, "%s\n", hfr_last_message());
        return EXIT_FAILURE;
    }
    for (int round = 0; status == HFR_OK && round < 100000; round++) {
        if (options.rank == 1 && round == 5)
            _exit(EXIT_SUCCESS);
        status = hfr_allreduce(comm, vector, COUNT, HFR_FLOAT32, HFR_SUM, WAIT, NULL);
    }
    hfr_last_error(&error);
    if (!go_on(comm)) {
        fprintf(stderr, "the survivors: %s\n", hfr_last_message());
        return EXIT_FAILURE;
    }
    hfr_close(comm, 1.0);
    if (status != HFR_PEER_DIED || error.peer != 1 || strcmp(error.peer_node, "node1")) {
        fprintf(stderr, "status %d, peer %d: %s\n", (int)status, (int)error.peer, error.message);
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
