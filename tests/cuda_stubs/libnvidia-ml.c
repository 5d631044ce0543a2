/* A libnvidia-ml.so.1 of a machine with GPUS GPUs, as far as torch, Ray and raylaunch ask it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_GPU_IS_LOST = 15 };

static char devices[GPUS ? GPUS : 1];

static int is_device(const void *device) { return (char *)device >= devices && (char *)device < devices + GPUS; }

int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlInit(void) { return NVML_SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = GPUS, NVML_SUCCESS; }

/* The last GPUs are faulty in different ways where the environment says so: RAYLAUNCH_FAULTY_GPUS=1. */
static int is_faulty(const void *device, int fault) {
    return getenv("RAYLAUNCH_FAULTY_GPUS") && (char *)device == devices + GPUS - fault;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= GPUS) return NVML_ERROR_INVALID_ARGUMENT;
    if (is_faulty(devices + index, 1)) return NVML_ERROR_GPU_IS_LOST;
    return *device = devices + index, NVML_SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    return snprintf(name, length, "NVIDIA Stub 1000"), NVML_SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    if (!is_device(device)) return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012d", (int)((char *)device - devices));
    return NVML_SUCCESS;
}

/* GPU n has 80 GiB of memory, uses n + 1 of it, and is busy for 10 n per cent of the time. */
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned index = 0;
    if (sscanf(uuid, "GPU-00000000-0000-0000-0000-%u", &index) != 1) return NVML_ERROR_INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *sizes) {
    sizes[0] = 80ull << 30;
    sizes[2] = ((char *)device - devices + 1ull) << 30;
    return sizes[1] = sizes[0] - sizes[2], NVML_SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    rates[0] = rates[1] = 10 * ((char *)device - devices);
    return NVML_SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *device, int uncorrected, int aggregate, unsigned long long *errors) {
    *errors = uncorrected == 1 && aggregate == 0 && is_faulty(device, 2) ? 2 : 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *not, unsigned *pending, unsigned *failed) {
    *corrected = *not = *failed = 0;
    *pending = is_faulty(device, 3);
    return NVML_SUCCESS;
}

/* GPU 0 has reached its limit of power, which is no fault, and is too hot if it is faulty. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    return *reasons = 0x04 | (is_faulty(device, 3) ? 0x48 : 0), NVML_SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *device, int *mode) { return *mode = !is_faulty(device, 2), NVML_SUCCESS; }

int nvmlDeviceGetComputeMode(void *device, int *mode) { return (void)device, *mode = 0, NVML_SUCCESS; }

const char *nvmlErrorString(int error) { return error ? "the stub does not know that" : "no error"; }
