/*
 * Reads and writes of 3FS through rings in shared memory.
 *
 * Binary and source compatible with the interface of the same name of DeepSeek's 3FS. A program
 * opens files in a mount of 3FS as usual, registers their descriptors, prepares any number of reads
 * or writes in a ring, submits them with one call, and waits for their results. Data moves between
 * the files and memory that the program shares with the daemon of the mount.
 *
 * Unless stated otherwise, a function returns 0 or a positive value on success and a negative errno
 * on failure. Functions may be called by any number of threads; a ring or memory must not be
 * destroyed while another call uses it. A forked child cannot use rings and memory of its parent
 * (EPERM); it creates its own.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HF3FS_SUPER_MAGIC 0x8f3f5fff

typedef void *hf3fs_iov_handle;
typedef void *hf3fs_ior_handle;

/* Memory that the daemon can access. The caller provides the structure, the library fills it. */
struct hf3fs_iov {
  uint8_t *base;           /* first byte */
  hf3fs_iov_handle iovh;   /* the library's; NULL after hf3fs_iovdestroy */

  char id[16];             /* random; a secret, because it gives access to the memory */
  char mount_point[256];
  size_t size;             /* in bytes */
  size_t block_size;       /* no I/O may cross a multiple of it; 0: no limit */
  int numa;                /* preferred NUMA node, or negative */
};

/* A ring for reads, or one for writes. */
struct hf3fs_ior {
  struct hf3fs_iov iov;    /* memory of the ring; not for data */
  hf3fs_ior_handle iorh;   /* the library's; NULL after hf3fs_iordestroy */

  char mount_point[256];
  bool for_read;
  int io_depth;
  int priority;
  int timeout;
  uint64_t flags;
};

/* Result of one I/O. */
struct hf3fs_cqe {
  int32_t index;           /* value that hf3fs_prep_io returned */
  int32_t reserved;
  int64_t result;          /* bytes that were read or written, or a negative errno */
  const void *userdata;    /* as passed to hf3fs_prep_io */
};

/* Whether a descriptor is of a file in a mount of 3FS. */
bool hf3fs_is_hf3fs(int fd);

/*
 * Writes the mount point that contains a path into hf3fs_mount_point, if size suffices. Returns the
 * size that it needs, including the terminating zero; -1 if the path is not in a mount of 3FS with
 * rings. Considers mounts of type fuse.hf3fs, or of any type if the environment variable
 * HF3FS_USRBIO_DONT_CHECKFS_FOR_MP is `yes`.
 */
int hf3fs_extract_mount_point(char *hf3fs_mount_point, int size, const char *path);

/*
 * Creates memory. It is allocated at once: ENOSPC if /dev/shm is full. ENOENT: not a mount of 3FS
 * with rings, or its daemon does not see this process's /dev/shm. EMFILE: a user may register as
 * much memory as an eighth of the daemon's descriptors. EINVAL: an unknown NUMA node, a block
 * larger than the memory, a size of 0, or a mount point of more than 255 bytes.
 */
int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *hf3fs_mount_point, size_t size, size_t block_size, int numa);

/* Opens memory that another process of the same user has created, by its id. */
int hf3fs_iovopen(struct hf3fs_iov *iov, const uint8_t id[16], const char *hf3fs_mount_point, size_t size,
                  size_t block_size, int numa);

/*
 * Uses memory of the program: base is a mapping of the beginning of a file in /dev/shm. The file is
 * found by its id: the id of memory that a process has created, or the name (as a UUID, with the
 * suffix .bN for a block size N) of a symbolic link to the file in 3fs-virt/iovs of the mount.
 * hf3fs_iovdestroy ends the registration and leaves the mapping to the program.
 */
int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const uint8_t id[16], const char *hf3fs_mount_point,
                  size_t size, size_t block_size, int numa);

/*
 * Removes the memory's name, so that nothing is left behind when the process is killed. A daemon
 * that runs as root removes it then; the name stays until the memory is destroyed.
 */
void hf3fs_iovunlink(struct hf3fs_iov *iov);

/* Ends the use of memory. I/O in flight continues to use it until it has completed. */
void hf3fs_iovdestroy(struct hf3fs_iov *iov);

/* Not supported: -ENOTSUP. */
int hf3fs_iovcreate_device(struct hf3fs_iov *iov, const char *hf3fs_mount_point, size_t size, size_t block_size,
                           int device_id);

/* Bytes of a ring with this number of entries; 0 if a ring cannot have it. */
size_t hf3fs_ior_size(int entries);

/*
 * Creates a ring with 1 to 65,536 entries: the number of I/Os that can be in flight.
 *
 * io_depth: 0 submits whatever is prepared. Above 0, I/Os are submitted in groups of this size only.
 * Below 0, at most -io_depth I/Os of the ring are executed at once.
 * priority and timeout (milliseconds, not negative) are accepted and have no effect.
 */
int hf3fs_iorcreate(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                    int numa);
int hf3fs_iorcreate2(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                     int priority, int numa);
int hf3fs_iorcreate3(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                     int priority, int timeout, int numa);

/* A permission that this implementation does not use: reads return committed data. */
#define HF3FS_IOR_ALLOW_READ_UNCOMMITTED 1
/* A read of a range with a hole fails with ENODATA; otherwise holes are zeros. */
#define HF3FS_IOR_FORBID_READ_HOLES 2

/* As above, with flags; EINVAL for unknown ones. */
int hf3fs_iorcreate4(struct hf3fs_ior *ior, const char *hf3fs_mount_point, int entries, bool for_read, int io_depth,
                     int timeout, int numa, uint64_t flags);

/* Destroys a ring. I/O in flight may still be executed. */
void hf3fs_iordestroy(struct hf3fs_ior *ior);

/*
 * Registers a descriptor. Returns the negative of a copy of it, which hf3fs_prep_io accepts as it
 * accepts the descriptor itself; a positive errno on failure: EBADF for a file that is not in 3FS,
 * EINVAL for a descriptor that is registered. The file stays open until it is deregistered.
 */
int hf3fs_reg_fd(int fd, uint64_t flags);
void hf3fs_dereg_fd(int fd);

/* Number of entries of a ring. */
int hf3fs_io_entries(const struct hf3fs_ior *ior);

/*
 * Prepares a read or a write of len bytes at offset off of a file, to or from ptr, which is inside
 * iov. Returns the index of the I/O. EAGAIN: the ring is full; wait for results first. EINVAL: the
 * range is outside the memory, len is 0, or read differs from the ring's for_read. EBADF: fd is not
 * registered. EACCES: fd is not open for this.
 *
 * A read ends at the end of the file. Writes are durable when they have completed, the new length
 * of the file after fsync or close.
 */
int hf3fs_prep_io(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read, void *ptr, int fd, size_t off,
                  uint64_t len, const void *userdata);

/* Starts what is prepared. */
int hf3fs_submit_ios(const struct hf3fs_ior *ior);

/*
 * Waits until min_results I/Os have completed, or until abs_timeout (CLOCK_REALTIME; NULL: no
 * limit). Returns the number of results in cqes, at most cqec.
 */
int hf3fs_wait_for_ios(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec, int min_results,
                       const struct timespec *abs_timeout);

/* link(2) and fallocate(2) with FALLOC_FL_PUNCH_HOLE for n ranges; 0 or a positive errno. */
int hf3fs_hardlink(const char *target, const char *link_name);
int hf3fs_punchhole(int fd, int n, const size_t *start, const size_t *end, size_t flags);

enum hf3fs_mem_type {
  HF3FS_MEM_HOST = 0,
  HF3FS_MEM_DEVICE = 1,
  HF3FS_MEM_MANAGED = 2,
};

/* Device memory is not supported: false, 0, HF3FS_MEM_HOST, -1, 0. */
bool hf3fs_gdr_available(void);
int hf3fs_gdr_device_count(void);
enum hf3fs_mem_type hf3fs_iov_mem_type(const struct hf3fs_iov *iov);
int hf3fs_iov_device_id(const struct hf3fs_iov *iov);
int hf3fs_iovsync(const struct hf3fs_iov *iov, int direction);

#ifdef __cplusplus
}
#endif
