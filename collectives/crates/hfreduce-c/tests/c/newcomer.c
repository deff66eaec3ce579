/* Rank 1 ends, and a newcomer takes its place. Its info goes to rank 0 through a file. */
#include <hfreduce.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define WAIT 60.0
#define MOST 65536

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, hfr_last_message()); \
            exit(EXIT_FAILURE);                                                            \
        }                                                                                  \
    } while (0)

#define OK(call) EXPECT((call) == HFR_OK)

static hfr_options options_on(const char *node)
{
    hfr_options options = HFR_OPTIONS_INIT;

    options.key = "a key of sixteen bytes or more";
    options.key_bytes = strlen(options.key);
    options.node = node;
    options.job = "test/c";
    return options;
}

/* Allreduce of rank + 1 over two ranks. */
static void sum_of_two(hfr_comm *comm, uint32_t rank)
{
    uint32_t found, ranks;
    int64_t value = rank + 1;

    OK(hfr_rank(comm, &found));
    OK(hfr_world_size(comm, &ranks));
    EXPECT(found == rank && ranks == 2);
    OK(hfr_allreduce(comm, &value, 1, HFR_INT64, HFR_SUM, WAIT, NULL));
    EXPECT(value == 3);
    OK(hfr_barrier(comm, WAIT, NULL));
    OK(hfr_close(comm, WAIT));
}

static void come(const char *path)
{
    hfr_options options = options_on("other");
    hfr_newcomer *newcomer = NULL;
    hfr_comm *comm = NULL, *again = NULL;
    const void *info = NULL;
    size_t bytes = 0;
    char new[4096];
    FILE *file;

    EXPECT(hfr_newcomer_init(NULL, &newcomer) == HFR_INVALID);
    EXPECT(hfr_newcomer_init(&options, NULL) == HFR_INVALID);
    options.key = NULL;
    EXPECT(hfr_newcomer_init(&options, &newcomer) == HFR_INVALID && strstr(hfr_last_message(), "key"));
    options = options_on("other");
    OK(hfr_newcomer_init(&options, &newcomer));
    EXPECT(hfr_newcomer_info(NULL, &info, &bytes) == HFR_INVALID);
    EXPECT(hfr_newcomer_info(newcomer, NULL, &bytes) == HFR_INVALID);
    EXPECT(hfr_newcomer_info(newcomer, &info, NULL) == HFR_INVALID);
    OK(hfr_newcomer_info(newcomer, &info, &bytes));
    EXPECT(bytes > 0 && bytes <= MOST);
    /* No member names it yet: it may be called again. */
    EXPECT(hfr_newcomer_join(newcomer, WAIT, NULL) == HFR_INVALID);
    EXPECT(hfr_newcomer_join(NULL, WAIT, &comm) == HFR_INVALID);
    EXPECT(hfr_newcomer_join(newcomer, 0.05, &comm) == HFR_TIMED_OUT && comm == NULL);
    snprintf(new, sizeof new, "%s.new", path);
    file = fopen(new, "wb");
    EXPECT(file != NULL && fwrite(info, 1, bytes, file) == bytes && fclose(file) == 0);
    EXPECT(rename(new, path) == 0);
    OK(hfr_newcomer_join(newcomer, WAIT, &comm));
    EXPECT(hfr_newcomer_join(newcomer, WAIT, &again) == HFR_INVALID && again == NULL);
    hfr_newcomer_free(newcomer); /* the group stays */
    sum_of_two(comm, 1);
}

/* The file of this name, once it is there. */
static FILE *once_there(const char *path)
{
    const struct timespec pause = { 0, 5000000 };
    const time_t until = time(NULL) + (time_t)WAIT;
    FILE *file;

    while ((file = fopen(path, "rb")) == NULL) {
        EXPECT(time(NULL) < until);
        nanosleep(&pause, NULL);
    }
    return file;
}

static size_t read_info(const char *path, unsigned char *info)
{
    FILE *file = once_there(path);
    const size_t bytes = fread(info, 1, MOST, file);

    fclose(file);
    return bytes;
}

static void survive(hfr_comm *comm, const char *path)
{
    static unsigned char info[MOST];
    hfr_comm *next = NULL;
    int64_t value = 1;

    EXPECT(hfr_allreduce(comm, &value, 1, HFR_INT64, HFR_SUM, WAIT, NULL) == HFR_PEER_DIED);
    {
        const size_t bytes = read_info(path, info);
        hfr_member members[] = { HFR_MEMBER_RANK(0), HFR_MEMBER_NEWCOMER(info, bytes) };
        hfr_member garbage[] = { HFR_MEMBER_RANK(0), HFR_MEMBER_NEWCOMER("garbage", 7) };

        EXPECT(hfr_reconfigure_with(comm, NULL, 1, WAIT, &next) == HFR_INVALID);
        EXPECT(hfr_reconfigure_with(comm, members, 2, WAIT, NULL) == HFR_INVALID);
        EXPECT(hfr_reconfigure_with(NULL, members, 2, WAIT, &next) == HFR_INVALID);
        EXPECT(hfr_reconfigure_with(comm, members, 0, WAIT, &next) == HFR_INVALID);
        EXPECT(hfr_reconfigure_with(comm, members + 1, 1, WAIT, &next) == HFR_INVALID);
        EXPECT(hfr_reconfigure_with(comm, garbage, 2, WAIT, &next) == HFR_INVALID
               && strstr(hfr_last_message(), "invalid info"));
        garbage[1].size = 8;
        EXPECT(hfr_reconfigure_with(comm, garbage, 2, WAIT, &next) == HFR_INVALID
               && strstr(hfr_last_message(), "members[1].size"));
        garbage[0].size = 8;
        EXPECT(hfr_reconfigure_with(comm, garbage, 2, WAIT, &next) == HFR_INVALID
               && strstr(hfr_last_message(), "HFR_MEMBER_RANK"));
        EXPECT(next == NULL);
        OK(hfr_reconfigure_with(comm, members, 2, WAIT, &next));
    }
    sum_of_two(next, 0);
    hfr_close(comm, 1.0);
}

int main(int argc, char **argv)
{
    hfr_comm *comm = NULL;
    hfr_options options = options_on("node");
    char met[4096];
    FILE *file;

    EXPECT(argc == 4);
    options.rank = (uint32_t)atoi(argv[1]);
    options.world_size = 2;
    options.rendezvous = argv[2];
    hfr_newcomer_free(NULL);
    if (options.rank == 2) {
        come(argv[3]);
        return EXIT_SUCCESS;
    }
    OK(hfr_init(&options, &comm));
    snprintf(met, sizeof met, "%s.met", argv[3]);
    if (options.rank == 1) {
        once_there(met); /* rank 0 has met us, so it does not see us die during the rendezvous */
        _exit(EXIT_SUCCESS);
    }
    file = fopen(met, "wb");
    EXPECT(file != NULL && fclose(file) == 0);
    survive(comm, argv[3]);
    return EXIT_SUCCESS;
}
