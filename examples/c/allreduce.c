/* Ranks add up a vector, once waiting and once with work in between.
 *
 *     cc -std=c11 -I collectives/crates/hfreduce-c/include examples/c/allreduce.c \
 *        -L target/release -lhfreduce -o allreduce
 *
 * Start it once a rank with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and HFREDUCE_KEY_FILE set,
 * as launchers do.
 */
#include <hfreduce.h>

#include <stdio.h>
#include <stdlib.h>

#define COUNT 100000
#define TIMEOUT 60.0 /* seconds: the longest that one operation may take */

static void check(hfr_status status, const char *what)
{
    hfr_error error = { .size = sizeof error };

    if (status == HFR_OK)
        return;
    hfr_last_error(&error);
    fprintf(stderr, "%s: %s\n", what, error.message);
    if (error.peer >= 0)
        fprintf(stderr, "rank %d on %s is to blame (%s)\n", (int)error.peer, error.peer_node,
                hfr_status_name(status));
    exit(EXIT_FAILURE);
}

int main(void)
{
    hfr_comm *comm = NULL;
    hfr_work *work = NULL;
    uint32_t rank = 0, ranks = 0;
    float *vector = malloc(COUNT * sizeof *vector);
    float expected = 0;

    if (vector == NULL || hfr_version() < HFR_VERSION)
        return EXIT_FAILURE;
    check(hfr_init_from_environment(&comm), "joining the group");
    check(hfr_rank(comm, &rank), "rank");
    check(hfr_world_size(comm, &ranks), "world size");

    for (size_t i = 0; i < COUNT; i++)
        vector[i] = (float)(rank + 1);
    for (uint32_t r = 0; r < ranks; r++)
        expected += (float)(r + 1);

    /* Without a handle the call returns when the sum is there. */
    check(hfr_allreduce(comm, vector, COUNT, HFR_FLOAT32, HFR_SUM, TIMEOUT, NULL), "allreduce");

    /* With one it returns at once; the vector is the library's until the operation has ended. */
    check(hfr_allreduce(comm, vector, COUNT, HFR_FLOAT32, HFR_AVG, TIMEOUT, &work), "allreduce");
    /* … work that does not touch the vector … */
    check(hfr_work_wait(work, TIMEOUT), "waiting for the average");
    hfr_work_free(work);

    for (size_t i = 0; i < COUNT; i++) {
        if (vector[i] != expected) {
            fprintf(stderr, "element %zu is %g, not %g\n", i, vector[i], expected);
            return EXIT_FAILURE;
        }
    }
    printf("rank %u of %u: %g\n", (unsigned)rank, (unsigned)ranks, vector[0]);
    check(hfr_close(comm, TIMEOUT), "closing");
    free(vector);
    return EXIT_SUCCESS;
}
