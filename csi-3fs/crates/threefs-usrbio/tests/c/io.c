/* io FOLDER: writes and reads through rings in a mounted folder, and the errors of wrong calls. */
#include <errno.h>
#include <fcntl.h>
#include <hf3fs_usrbio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);       \
      exit(1);                                                              \
    }                                                                       \
  } while (0)

enum { BLOCK = 64 << 10, BLOCKS = 40 };

static char mount_point[256];

static void transfer(struct hf3fs_ior *ior, struct hf3fs_iov *iov, int fd, int blocks) {
  for (int i = 0; i < blocks; i++) {
    int slot = hf3fs_prep_io(ior, iov, ior->for_read, iov->base + (size_t)i * BLOCK, fd, (size_t)i * BLOCK, BLOCK,
                             (void *)(size_t)(i + 1));
    CHECK(slot >= 0 && slot < hf3fs_io_entries(ior));
  }
  CHECK(hf3fs_submit_ios(ior) == 0);
  struct timespec deadline = {.tv_sec = time(NULL) + 30};
  int done = 0, seen[BLOCKS] = {0};
  while (done < blocks) {
    struct hf3fs_cqe cqes[7];
    int count = hf3fs_wait_for_ios(ior, cqes, 7, 1, &deadline);
    CHECK(count > 0);
    for (int i = 0; i < count; i++) {
      CHECK(cqes[i].result == BLOCK);
      size_t number = (size_t)cqes[i].userdata;
      CHECK(number >= 1 && number <= (size_t)blocks && !seen[number - 1]);
      seen[number - 1] = 1;
    }
    done += count;
  }
}

static void whole_file(const char *path) {
  struct hf3fs_iov iov;
  struct hf3fs_ior reads, writes;
  CHECK(hf3fs_iovcreate(&iov, mount_point, (size_t)BLOCK * BLOCKS, 0, -1) == 0);
  CHECK(hf3fs_iorcreate4(&reads, mount_point, BLOCKS, true, 0, 0, -1, 0) == 0);
  CHECK(hf3fs_iorcreate4(&writes, mount_point, BLOCKS, false, -4, 0, -1, 0) == 0);
  CHECK(hf3fs_io_entries(&reads) == BLOCKS && reads.for_read && !writes.for_read);
  int fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0644);
  CHECK(fd >= 0 && hf3fs_is_hf3fs(fd) && !hf3fs_is_hf3fs(0));
  int copy = hf3fs_reg_fd(fd, 0);
  CHECK(copy < 0);
  CHECK(hf3fs_reg_fd(fd, 0) == EINVAL);
  for (size_t i = 0; i < iov.size; i++) iov.base[i] = (uint8_t)(i * 7 + i / BLOCK);
  transfer(&writes, &iov, fd, BLOCKS);
  struct stat st;
  CHECK(fstat(fd, &st) == 0 && (size_t)st.st_size == iov.size);
  uint8_t *direct = malloc(iov.size);
  CHECK(pread(fd, direct, iov.size, 0) == (ssize_t)iov.size);
  CHECK(memcmp(direct, iov.base, iov.size) == 0);
  /* The kernel has pages now; a ring's write must reach readers through the kernel. */
  iov.base[5] ^= 1;
  transfer(&writes, &iov, copy, 1);
  CHECK(pread(fd, direct, iov.size, 0) == (ssize_t)iov.size);
  CHECK(memcmp(direct, iov.base, iov.size) == 0);
  /* And the other way round. */
  direct[9] ^= 1;
  CHECK(pwrite(fd, direct + 9, 1, 9) == 1);
  memset(iov.base, 0, iov.size);
  transfer(&reads, &iov, copy, BLOCKS);
  CHECK(memcmp(direct, iov.base, iov.size) == 0);
  /* Beyond the end: short, then nothing. */
  struct hf3fs_cqe cqe;
  CHECK(hf3fs_prep_io(&reads, &iov, true, iov.base, fd, iov.size - 10, 100, NULL) >= 0);
  CHECK(hf3fs_submit_ios(&reads) == 0 && hf3fs_wait_for_ios(&reads, &cqe, 1, 1, NULL) == 1 && cqe.result == 10);
  CHECK(hf3fs_prep_io(&reads, &iov, true, iov.base, fd, iov.size + 10, 100, NULL) >= 0);
  CHECK(hf3fs_submit_ios(&reads) == 0 && hf3fs_wait_for_ios(&reads, &cqe, 1, 1, NULL) == 1 && cqe.result == 0);
  /* Memory in another process of the user: the same bytes. */
  struct hf3fs_iov second;
  CHECK(hf3fs_iovopen(&second, (uint8_t *)iov.id, mount_point, iov.size, 0, -1) == 0);
  CHECK(second.base != iov.base && memcmp(second.base, iov.base, iov.size) == 0);
  transfer(&reads, &second, fd, 3);
  hf3fs_iovdestroy(&second);
  hf3fs_dereg_fd(fd);
  CHECK(hf3fs_prep_io(&reads, &iov, true, iov.base, fd, 0, 1, NULL) == -EBADF);
  CHECK(hf3fs_prep_io(&reads, &iov, true, iov.base, copy, 0, 1, NULL) == -EBADF);
  close(fd);
  free(direct);
  hf3fs_iovunlink(&iov);
  hf3fs_iordestroy(&writes);
  hf3fs_iordestroy(&reads);
  hf3fs_iovdestroy(&iov);
  CHECK(!iov.iovh && !reads.iorh);
}

static void wrong_calls(const char *path) {
  struct hf3fs_iov iov;
  struct hf3fs_ior ior;
  CHECK(hf3fs_iovcreate(&iov, "/", 4096, 0, -1) == -ENOENT);
  CHECK(hf3fs_iovcreate(&iov, NULL, 4096, 0, -1) == -EINVAL);
  CHECK(hf3fs_iovcreate(&iov, mount_point, 0, 0, -1) == -EINVAL);
  CHECK(hf3fs_iovcreate(&iov, mount_point, 4096, 8192, -1) == -EINVAL);
  CHECK(hf3fs_iovcreate(&iov, mount_point, 4096, 0, 100000) == -EINVAL);
  CHECK(hf3fs_iovcreate(NULL, mount_point, 4096, 0, -1) == -EINVAL);
  CHECK(hf3fs_iovcreate_device(&iov, mount_point, 4096, 0, 0) == -ENOTSUP && !hf3fs_gdr_available());
  uint8_t unknown[16] = {1};
  CHECK(hf3fs_iovopen(&iov, unknown, mount_point, 4096, 0, -1) == -ENOENT);
  CHECK(hf3fs_iovwrap(&iov, &iov, unknown, mount_point, 4096, 0, -1) == -ENOENT);
  CHECK(hf3fs_iorcreate(&ior, mount_point, 0, true, 0, -1) == -EINVAL);
  CHECK(hf3fs_iorcreate(&ior, mount_point, 65537, true, 0, -1) == -EINVAL);
  CHECK(hf3fs_iorcreate(&ior, mount_point, 4, true, 5, -1) == -EINVAL);
  CHECK(hf3fs_iorcreate3(&ior, mount_point, 4, true, 0, 0, -1, -1) == -EINVAL);
  CHECK(hf3fs_iorcreate4(&ior, mount_point, 4, true, 0, 0, -1, 4) == -EINVAL);
  CHECK(hf3fs_reg_fd(-1, 0) == EBADF && hf3fs_reg_fd(0, 0) == EBADF);
  hf3fs_dereg_fd(12345);
  CHECK(hf3fs_submit_ios(NULL) == -EINVAL && hf3fs_wait_for_ios(NULL, NULL, 1, 1, NULL) == -EINVAL);
  hf3fs_iordestroy(NULL);
  hf3fs_iovdestroy(NULL);
  hf3fs_iovunlink(NULL);

  CHECK(hf3fs_iovcreate(&iov, mount_point, 4 * 4096, 4096, 0) == 0);
  CHECK(hf3fs_iorcreate2(&ior, mount_point, 4, true, 2, 1, -1) == 0);
  int fd = open(path, O_RDONLY), write_only = open(path, O_WRONLY);
  CHECK(hf3fs_reg_fd(fd, 0) < 0 && hf3fs_reg_fd(write_only, 0) < 0);
  CHECK(hf3fs_prep_io(&ior, &iov, false, iov.base, fd, 0, 1, NULL) == -EINVAL);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base - 1, fd, 0, 1, NULL) == -EINVAL);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, 0, NULL) == -EINVAL);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base + 1, fd, 0, 4 * 4096, NULL) == -EINVAL);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, UINT64_MAX, NULL) == -EINVAL);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, write_only, 0, 1, NULL) == -EACCES);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, 12345, 0, 1, NULL) == -EBADF);
  struct hf3fs_cqe cqes[4];
  struct timespec past = {0};
  CHECK(hf3fs_wait_for_ios(&ior, cqes, 0, 0, NULL) == -EINVAL);
  CHECK(hf3fs_wait_for_ios(&ior, cqes, 4, 0, NULL) == 0);
  /* Groups of two: the third waits for the fourth. The second one crosses a block. */
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, 4096, NULL) == 0);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base + 1, fd, 0, 4096, NULL) == 1);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base + 4096, fd, 0, 4096, NULL) == 2);
  CHECK(hf3fs_submit_ios(&ior) == 0);
  CHECK(hf3fs_wait_for_ios(&ior, cqes, 4, 2, NULL) == 2);
  CHECK(cqes[0].result + cqes[1].result == 4096 - EINVAL);
  CHECK(hf3fs_wait_for_ios(&ior, cqes, 4, 1, &past) == 0);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, 4096, NULL) >= 0);
  CHECK(hf3fs_submit_ios(&ior) == 0 && hf3fs_wait_for_ios(&ior, cqes, 4, 2, NULL) == 2);
  /* A full ring. */
  for (int i = 0; i < 4; i++) CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, 1, NULL) >= 0);
  CHECK(hf3fs_prep_io(&ior, &iov, true, iov.base, fd, 0, 1, NULL) == -EAGAIN);
  CHECK(hf3fs_submit_ios(&ior) == 0 && hf3fs_wait_for_ios(&ior, cqes, 4, 4, NULL) == 4);
  hf3fs_dereg_fd(fd);
  hf3fs_dereg_fd(write_only);
  hf3fs_iordestroy(&ior);
  hf3fs_iovdestroy(&iov);
  close(fd);
  close(write_only);
}

static void holes_and_links(const char *path, const char *linked) {
  CHECK(hf3fs_hardlink(path, linked) == 0 && hf3fs_hardlink(path, linked) == EEXIST);
  int fd = open(path, O_RDWR);
  size_t start[] = {0}, end[] = {1 << 20};
  CHECK(ftruncate(fd, 4 << 20) == 0);
  CHECK(hf3fs_punchhole(fd, 1, start, end, 0) == 0 && hf3fs_punchhole(0, 1, start, end, 0) == EBADF);
  CHECK(hf3fs_punchhole(fd, 1, end, start, 0) == EINVAL);
  struct hf3fs_iov iov;
  struct hf3fs_ior zeros, strict;
  CHECK(hf3fs_iovcreate(&iov, mount_point, 4 << 20, 0, -1) == 0);
  CHECK(hf3fs_iorcreate4(&zeros, mount_point, 1, true, 0, 0, -1, HF3FS_IOR_ALLOW_READ_UNCOMMITTED) == 0);
  CHECK(hf3fs_iorcreate4(&strict, mount_point, 1, true, 0, 0, -1, HF3FS_IOR_FORBID_READ_HOLES) == 0);
  CHECK(hf3fs_reg_fd(fd, 0) < 0);
  struct hf3fs_cqe cqe;
  memset(iov.base, 1, iov.size);
  CHECK(hf3fs_prep_io(&zeros, &iov, true, iov.base, fd, 0, iov.size, NULL) == 0 && hf3fs_submit_ios(&zeros) == 0);
  CHECK(hf3fs_wait_for_ios(&zeros, &cqe, 1, 1, NULL) == 1 && cqe.result == (int64_t)iov.size);
  for (size_t i = 0; i < 1 << 20; i++) CHECK(iov.base[i] == 0);
  for (size_t i = 3 << 20; i < iov.size; i++) CHECK(iov.base[i] == 0);
  CHECK(hf3fs_prep_io(&strict, &iov, true, iov.base, fd, 0, iov.size, NULL) == 0 && hf3fs_submit_ios(&strict) == 0);
  CHECK(hf3fs_wait_for_ios(&strict, &cqe, 1, 1, NULL) == 1 && cqe.result == -ENODATA);
  CHECK(hf3fs_prep_io(&strict, &iov, true, iov.base, fd, 1 << 20, 1 << 20, NULL) == 0 && hf3fs_submit_ios(&strict) == 0);
  CHECK(hf3fs_wait_for_ios(&strict, &cqe, 1, 1, NULL) == 1 && cqe.result == 1 << 20);
  hf3fs_dereg_fd(fd);
  close(fd);
  hf3fs_iordestroy(&zeros);
  hf3fs_iordestroy(&strict);
  hf3fs_iovdestroy(&iov);
}

int main(int count, char **arguments) {
  CHECK(count == 2);
  char path[512], linked[512];
  snprintf(path, sizeof path, "%s/file", arguments[1]);
  snprintf(linked, sizeof linked, "%s/linked", arguments[1]);
  int size = hf3fs_extract_mount_point(mount_point, sizeof mount_point, path);
  CHECK(size == (int)strlen(mount_point) + 1 && size > 1);
  char one = 'x';
  CHECK(hf3fs_extract_mount_point(&one, 1, path) == size && one == 'x');
  CHECK(hf3fs_extract_mount_point(mount_point, sizeof mount_point, "/dev/zero") == -1);
  whole_file(path);
  wrong_calls(path);
  holes_and_links(path, linked);
  return 0;
}
