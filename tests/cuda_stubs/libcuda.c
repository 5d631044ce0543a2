/* A libcuda.so.1 that finds no device, and notes in the file LOG the command line or title of each process that calls
   cuInit. To load the library is harmless: each process that imports a torch with CUDA does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100 };

static void note(void) {
    char title[512] = "", line[1024];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, title, sizeof title - 1);
    for (ssize_t at = 0; at < size; at++)
        if (title[at] < ' ') title[at] = ' ';
    close(file);
    int length = snprintf(line, sizeof line, "%s\n", title);
    file = open(LOG, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (write(file, line, length) < 0) perror(LOG);
    close(file);
}

static int none(void) { return CUDA_ERROR_NO_DEVICE; }

int cuInit(unsigned flags) {
    (void)flags;
    note();
    return CUDA_ERROR_NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
    *version = 13030;
    return CUDA_SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = 0;
    return CUDA_ERROR_NO_DEVICE;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *found = dlsym(RTLD_DEFAULT, name);
    Dl_info own, other;
    if (!*found || !dladdr((void *)note, &own) || !dladdr(*found, &other) || own.dli_fbase != other.dli_fbase)
        *found = (void *)none;
    if (status) *status = 0;
    return CUDA_SUCCESS;
}

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
