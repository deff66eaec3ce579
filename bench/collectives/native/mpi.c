/* MPI_Allreduce in rounds: mpirun -n RANKS mpi SOCKET CREW
 *
 * Sums in place. The standard has no bfloat16: it is an operation of the user's, as MPI's users write
 * it, and compiled for this machine. */
#include "rank.h"

#include <mpi.h>

static void add_bfloat16(void *input, void *output, int *count, MPI_Datatype *type)
{
    const uint16_t *more = input;
    uint16_t *sum = output;

    (void)type;
    for (int at = 0; at < *count; at++) {
        uint32_t a = (uint32_t)more[at] << 16, b = (uint32_t)sum[at] << 16;
        float first, second;

        memcpy(&first, &a, sizeof first);
        memcpy(&second, &b, sizeof second);
        first += second;
        memcpy(&a, &first, sizeof a);
        sum[at] = (uint16_t)((a + 0x7FFFu + ((a >> 16) & 1u)) >> 16); /* to nearest even */
    }
}

int main(int argc, char **argv)
{
    int rank, ranks;
    MPI_Op add;
    FILE *file;
    struct order order;
    void *memory = NULL;
    size_t held = 0;

    MPI_Init(&argc, &argv);
    if (argc != 3)
        return EXIT_FAILURE;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Op_create(add_bfloat16, 1, &add);
    file = orders(argv[1], argv[2], rank);
    while (next(file, &order)) {
        int wide = !strcmp(order.type, "float32");
        double begun, seconds;

        if (strcmp(order.kind, "private") || (!wide && strcmp(order.type, "bfloat16"))) {
            fprintf(file, "no such type or memory\n");
            continue;
        }
        if (order.bytes > held) {
            free(memory);
            memory = aligned_alloc(4096, order.bytes);
            held = order.bytes;
            if (!memory)
                die("memory");
        }
        fill(memory, &order);
        MPI_Barrier(MPI_COMM_WORLD);
        begun = now();
        for (long call = 0; call < order.count; call++)
            MPI_Allreduce(MPI_IN_PLACE, memory, (int)(order.bytes / (wide ? 4 : 2)),
                          wide ? MPI_FLOAT : MPI_UINT16_T, wide ? MPI_SUM : add, MPI_COMM_WORLD);
        seconds = now() - begun;
        if (order.check && !right(memory, &order, (unsigned)ranks))
            fprintf(file, "no right result\n");
        else
            fprintf(file, "ok %.9f\n", seconds);
    }
    MPI_Op_free(&add);
    MPI_Finalize();
    return EXIT_SUCCESS;
}
