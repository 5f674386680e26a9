/* The C API of the runtime: problem in, prepared operator out, launches that allocate nothing.
 *
 *   wyvern_runtime* runtime;     wyvern_runtime_create(NULL, &runtime);
 *   wyvern_device* device;       wyvern_device_open("cuda:0", &device);
 *   wyvern_problem* problem;     wyvern_problem_create("gated_delta_rule", &problem);
 *   wyvern_problem_set_int(problem, "T", 8192);
 *   wyvern_operator* op;         wyvern_prepare(runtime, device, problem, NULL, &op);
 *   wyvern_launch launch = WYVERN_LAUNCH_INIT;
 *   launch.tensors = tensors;    launch.tensor_count = 6;
 *   wyvern_operator_launch(op, &launch);
 *
 * The header compiles as C11 and as C++. <wyvern/problem.hpp> (Problem) and <wyvern/runtime.hpp>
 * (Arguments) define what a problem means and each tensor's shape and content. Fields and tensors
 * have the same names here, so that a new one needs no new function.
 *
 * Errors. A function that can fail returns a wyvern_status. After any but WYVERN_OK
 * wyvern_last_error() returns one sentence that names the argument, its value and what is legal;
 * output handles are NULL then and other outputs are not written. No C++ exception leaves the
 * library. A null pointer where none is allowed is WYVERN_BAD_INPUT; a wrong pointer, or a handle
 * that was destroyed, is undefined behaviour.
 *
 * Ownership. The caller destroys each object with the _destroy function of its type, which accepts
 * NULL. Handles may be destroyed in any order: an operator holds references to what it needs of its
 * runtime and device, memory to its device. Destroying an operator or memory does not wait for a
 * GPU: work that uses it must be done. Input text is NUL-terminated UTF-8 and copied. Output text
 * is never NULL; its function says how long it lives.
 *
 * Threads. Several threads may use any handle at once, a wyvern_problem only while none of them
 * changes it. No thread may use a handle while or after another destroys it.
 *
 * Versions. Later versions add functions, values of enumerations and members at the end of structs,
 * and never remove or change any. So a program works with every library whose
 * wyvern_api_version() is at least the WYVERN_API_VERSION it was compiled with. A struct has its
 * size as the caller knows it. The library reads members that an older caller does not have as 0.
 * Bytes beyond its own struct it sets to 0 where it writes, and where it reads they must be 0
 * (WYVERN_BAD_INPUT: a newer caller sets a member that this library does not know). So initialize
 * structs to zeros, or with the macro beside them. */
#ifndef WYVERN_WYVERN_H
#define WYVERN_WYVERN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WYVERN_C_API __attribute__((visibility("default")))

/* ---- Versions and errors ---- */

#define WYVERN_API_VERSION 2

/* The WYVERN_API_VERSION of the library that runs. Never fails. */
WYVERN_C_API int wyvern_api_version(void);
/* The library's own version: "MAJOR.MINOR.PATCH". Lives forever. Never fails. */
WYVERN_C_API const char* wyvern_version(void);

typedef enum wyvern_status {
  WYVERN_OK = 0,
  WYVERN_BAD_INPUT = 1,     /* an argument is wrong: which one, its value, what is legal */
  WYVERN_UNAVAILABLE = 2,   /* a device, driver or compiler is missing or failed: what to do */
  WYVERN_COMPILE_ERROR = 3, /* a kernel did not compile: with the compiler's own message */
  WYVERN_IO_ERROR = 4,      /* a file could not be read or written */
  WYVERN_OUT_OF_MEMORY = 5, /* of the host */
  WYVERN_INTERNAL_ERROR = 6 /* a defect of the library */
} wyvern_status;

/* The message of this thread's last call that failed; "" before the first. Calls that succeed leave
 * it. Owned by the library, valid until the thread's next call that fails. Never fails. */
WYVERN_C_API const char* wyvern_last_error(void);

/* ---- Devices ---- */

typedef struct wyvern_device wyvern_device;           /* an open device */
typedef struct wyvern_device_list wyvern_device_list; /* the devices when it was created */
typedef struct wyvern_memory wyvern_memory;           /* memory on a device */

typedef struct wyvern_device_info {
  size_t struct_size;
  const char* name;    /* "cpu", "cuda:0" */
  const char* kind;    /* "cpu", "cuda" */
  const char* model;   /* "NVIDIA H200", or the processor's name */
  const char* arch;    /* "sm_90a"; of the CPU vendor, family and model */
  const char* key;     /* identifies the device in measurements */
  const char* driver;  /* CUDA's version and the driver's; the CPU's target name */
  const char* problem; /* empty when usable, else what is wrong and how to fix it */
  int64_t units;       /* multiprocessors, or threads used */
  int64_t memory_bytes;
  double clock_ghz;
  double peak_bytes_per_s; /* of device memory; 0: unknown */
} wyvern_device_info;

/* All zeros but the size. The same for each struct below. */
#define WYVERN_DEVICE_INFO_INIT {sizeof(wyvern_device_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* Opens "cpu" or "cuda:N". A GPU is used by its primary context, that of the CUDA runtime.
 * WYVERN_BAD_INPUT for another spelling, WYVERN_UNAVAILABLE where the device or its driver is
 * missing. Opening a device again returns another handle to the same device. */
WYVERN_C_API wyvern_status wyvern_device_open(const char* name, wyvern_device** device);
/* Opens the first usable GPU, else the CPU. */
WYVERN_C_API wyvern_status wyvern_device_open_best(wyvern_device** device);
WYVERN_C_API void wyvern_device_destroy(wyvern_device* device);
/* The texts live as long as the handle. */
WYVERN_C_API wyvern_status wyvern_device_get_info(const wyvern_device* device,
                                                  wyvern_device_info* info);

/* Lists every device of the machine, the CPU first, unusable ones with their problem. */
WYVERN_C_API wyvern_status wyvern_device_list_create(wyvern_device_list** list);
WYVERN_C_API void wyvern_device_list_destroy(wyvern_device_list* list);
/* 0 for NULL. */
WYVERN_C_API size_t wyvern_device_list_count(const wyvern_device_list* list);
/* `index` is below the count. The texts live as long as the list. */
WYVERN_C_API wyvern_status wyvern_device_list_get(const wyvern_device_list* list, size_t index,
                                                  wyvern_device_info* info);

/* Allocates uninitialized memory on the device, aligned to 256 bytes, for callers without an
 * allocator of their own. WYVERN_UNAVAILABLE where there is too little. */
WYVERN_C_API wyvern_status wyvern_memory_create(const wyvern_device* device, size_t bytes,
                                                wyvern_memory** memory);
WYVERN_C_API void wyvern_memory_destroy(wyvern_memory* memory);
/* The address on the device, as long as the handle lives; NULL for NULL. */
WYVERN_C_API void* wyvern_memory_data(const wyvern_memory* memory);

/* Copy `bytes` between host and device memory and wait for the copy. They do not wait for
 * non-blocking streams: call wyvern_device_synchronize() for such a stream first. */
WYVERN_C_API wyvern_status wyvern_device_copy_in(const wyvern_device* device, void* to,
                                                 const void* from_host, size_t bytes);
WYVERN_C_API wyvern_status wyvern_device_copy_out(const wyvern_device* device, void* to_host,
                                                  const void* from, size_t bytes);
/* Sets every byte to `byte`, ordered after `stream`, a CUstream (NULL: the default stream). The CPU
 * ignores streams: every call is complete when it returns. */
WYVERN_C_API wyvern_status wyvern_device_fill(const wyvern_device* device, void* to,
                                              unsigned char byte, size_t bytes, void* stream);
/* Waits for all work of the stream. WYVERN_UNAVAILABLE where the device reports a fault. */
WYVERN_C_API wyvern_status wyvern_device_synchronize(const wyvern_device* device, void* stream);

/* ---- Problems ---- */

/* Element types of tensors. 0 is not one, so that the library refuses a dtype that was not set. */
typedef enum wyvern_dtype {
  WYVERN_FP32 = 1,
  WYVERN_FP16 = 2,
  WYVERN_BF16 = 3,
  WYVERN_INT32 = 4,
  WYVERN_INT64 = 5,
  WYVERN_BOOLEAN = 6,     /* a byte, 0 or 1 */
  WYVERN_FLOAT8_E4M3 = 7, /* OCP: no infinities, 448 the largest number */
  WYVERN_FLOAT8_E5M2 = 8
} wyvern_dtype;

/* What to compute: an operator, a pass, a shape, dtypes, options. */
typedef struct wyvern_problem wyvern_problem;

typedef enum wyvern_field_type {
  WYVERN_FIELD_TEXT = 1, /* wyvern_problem_set_text(): a name ("forward", "bf16", "tf32x3") */
  WYVERN_FIELD_INT = 2,  /* wyvern_problem_set_int() */
  WYVERN_FIELD_BOOL = 3, /* wyvern_problem_set_int(): 0 or 1 */
  WYVERN_FIELD_REAL = 4  /* wyvern_problem_set_real() */
} wyvern_field_type;

/* A field of a problem. The texts live forever. */
typedef struct wyvern_field_info {
  size_t struct_size;
  const char* name;
  const char* help;     /* one line */
  const char* scope;    /* the operators and passes it applies to: "kda only"; empty: all */
  const char* value;    /* its default as text; empty: unset */
  int32_t type;         /* a wyvern_field_type */
  int32_t may_be_unset; /* 1: wyvern_problem_unset() accepts it */
} wyvern_field_info;

#define WYVERN_FIELD_INFO_INIT {sizeof(wyvern_field_info), 0, 0, 0, 0, 0, 0}

/* How many fields a problem has in this library. */
WYVERN_C_API size_t wyvern_field_count(void);
/* `index` is below the count. A field's index may differ between versions. */
WYVERN_C_API wyvern_status wyvern_field_get(size_t index, wyvern_field_info* info);

/* How many operators this library has, and their names, which live forever; NULL for an index at or
 * above the count. */
WYVERN_C_API size_t wyvern_operator_name_count(void);
WYVERN_C_API const char* wyvern_operator_name(size_t index);

/* A problem of the operator, all other fields at their defaults. */
WYVERN_C_API wyvern_status wyvern_problem_create(const char* op, wyvern_problem** problem);
WYVERN_C_API wyvern_status wyvern_problem_copy(const wyvern_problem* from,
                                               wyvern_problem** problem);
WYVERN_C_API void wyvern_problem_destroy(wyvern_problem* problem);

/* Set a field by its name. WYVERN_BAD_INPUT for an unknown field, a field of another type, and a
 * text that is not one of the field's names. wyvern_problem_validate(), and every function that
 * takes a problem, checks whether the values are legal together. */
WYVERN_C_API wyvern_status wyvern_problem_set_int(wyvern_problem* problem, const char* field,
                                                  int64_t value);
WYVERN_C_API wyvern_status wyvern_problem_set_real(wyvern_problem* problem, const char* field,
                                                   double value);
WYVERN_C_API wyvern_status wyvern_problem_set_text(wyvern_problem* problem, const char* field,
                                                   const char* value);
/* Unsets a field: the rest of the problem then determines its value. */
WYVERN_C_API wyvern_status wyvern_problem_unset(wyvern_problem* problem, const char* field);
/* Writes a field of any type as text: "8192", "true", "bf16"; empty where it is unset. Writes at
 * most `capacity` bytes, the NUL included (`text` may be NULL where `capacity` is 0), truncates a
 * longer text, and writes the full length without the NUL to `length`, which may be NULL. */
WYVERN_C_API wyvern_status wyvern_problem_get_text(const wyvern_problem* problem, const char* field,
                                                   char* text, size_t capacity, size_t* length);

/* WYVERN_OK for a legal problem, else WYVERN_BAD_INPUT with the first wrong field. */
WYVERN_C_API wyvern_status wyvern_problem_validate(const wyvern_problem* problem);
/* Writes the key of the problem's tuned plans as wyvern_problem_get_text() writes text. The problem
 * must be legal. */
WYVERN_C_API wyvern_status wyvern_problem_key(const wyvern_problem* problem, char* text,
                                              size_t capacity, size_t* length);

/* ---- Tensors ---- */

#define WYVERN_MAX_RANK 8

typedef enum wyvern_access {
  WYVERN_READ = 1,      /* an input */
  WYVERN_WRITE = 2,     /* an output: every element is written */
  WYVERN_READ_WRITE = 3 /* updated in place */
} wyvern_access;

/* What a tensor of a launch must be. */
typedef struct wyvern_tensor_spec {
  const char* name; /* lives forever */
  int32_t present;  /* 1: the problem requires it; 0: it must be absent, all below is 0 */
  int32_t access;   /* a wyvern_access */
  int32_t dtype;    /* a wyvern_dtype */
  int32_t rank;
  int64_t shape[WYVERN_MAX_RANK]; /* elements; 0 beyond the rank */
  size_t bytes;                   /* of the contiguous tensor */
  /* Version 2. 1: the operator's plan accepts it strided, as wyvern_tensor says; 0: it must be
   * contiguous. Always 0 from wyvern_problem_tensors(), as plans differ. */
  int64_t strided;
} wyvern_tensor_spec;

/* Describes every tensor that operators can have; `present` marks those of a launch of this legal
 * problem. Needs no device. Writes the first `capacity` specs at intervals of `spec_size` bytes,
 * sizeof(wyvern_tensor_spec) (`specs` may be NULL where `capacity` is 0), and their full number to
 * `count`, which may be NULL. The order is that of wyvern_operator_tensors() and may differ between
 * versions: look tensors up by name. */
WYVERN_C_API wyvern_status wyvern_problem_tensors(const wyvern_problem* problem,
                                                  wyvern_tensor_spec* specs, size_t spec_size,
                                                  size_t capacity, size_t* count);

/* ---- The runtime ---- */

/* Finds plans, compiles and loads kernels, and keeps them loaded while it lives; one per process is
 * enough. After fork() the child may use it on the CPU, but not on a GPU. */
typedef struct wyvern_runtime wyvern_runtime;

typedef struct wyvern_runtime_options {
  size_t struct_size;
  /* The folder of the cache of compiled kernels and tuned plans; NULL: the user's own
   * ($WYVERN_CACHE_DIR, else $XDG_CACHE_HOME/wyvern, else ~/.cache/wyvern). An unusable folder is
   * no error: each process then compiles its kernels. */
  const char* cache_directory;
  /* Threads that compile one plan's kernels; 0: one per core. */
  uint64_t compile_jobs;
  /* Called with one sentence, from the thread concerned, when the default plan replaces a tuned
   * plan that cannot be used, when the cache fails in whole or in part, and when a tuning that a
   * policy began fails; NULL: a line on stderr. The sentence lives until the function
   * returns. The function must neither throw nor call wyvern_ functions on this runtime. It gets
   * `user`, which must be valid while the runtime lives. */
  void (*on_degraded)(const char* sentence, void* user);
  void* user;
  /* Version 2. The program `wyvern`, with which policies tune: a path or a name on PATH; NULL: the
   * one installed with this library, else `wyvern` on PATH. */
  const char* command;
} wyvern_runtime_options;

#define WYVERN_RUNTIME_OPTIONS_INIT {sizeof(wyvern_runtime_options), 0, 0, 0, 0, 0}

/* `options` may be NULL: all zeros. */
WYVERN_C_API wyvern_status wyvern_runtime_create(const wyvern_runtime_options* options,
                                                 wyvern_runtime** runtime);
WYVERN_C_API void wyvern_runtime_destroy(wyvern_runtime* runtime);
/* How many kernels this runtime compiled, because it found them neither loaded nor in the cache; 0
 * for NULL. */
WYVERN_C_API int64_t wyvern_runtime_compiled(const wyvern_runtime* runtime);

/* Where an operator's plan may come from. With _ON_MISS and _BACKGROUND (version 2) the program
 * `wyvern` tunes a problem in a process of its own: each problem key at most once per device and
 * runtime, even where that fails, and one problem at a time. A child of fork() does not continue
 * its parent's tunings. */
typedef enum wyvern_policy {
  WYVERN_POLICY_CACHED = 0,     /* tuned plans of the cache, else the default plan */
  WYVERN_POLICY_OFF = 1,        /* the default plan */
  WYVERN_POLICY_ON_MISS = 2,    /* wyvern_prepare() tunes an untuned problem first, for the budget;
                                   the program's progress goes to stderr, and ^C ends it and keeps
                                   its measurements */
  WYVERN_POLICY_BACKGROUND = 3, /* the best known plan, while an untuned problem is tuned in the
                                  background, which takes some of the machine's time:
                                  wyvern_operator_is_outdated() says when to prepare it again */
  WYVERN_POLICY_FIXED = 4 /* the best plan of packs, else the default plan, never one tuned on this
                             machine: equal packs and devices give equal plans */
} wyvern_policy;

typedef struct wyvern_prepare_options {
  size_t struct_size;
  int64_t policy;   /* a wyvern_policy */
  const char* plan; /* not NULL: this plan, as wyvern_operator_plan() writes it; policy is 0 then */
  /* Version 2. Seconds that a policy may spend on tuning the problem; 0: 60. */
  double tuning_budget_s;
} wyvern_prepare_options;

#define WYVERN_PREPARE_OPTIONS_INIT {sizeof(wyvern_prepare_options), 0, 0, 0}

/* A prepared operator: compiled, loaded, ready. Never changes. */
typedef struct wyvern_operator wyvern_operator;

/* Prepares an operator for the problem, which it copies. Compiles the kernels that the cache lacks:
 * milliseconds to seconds the first time, microseconds when all are loaded, even while other
 * threads compile. Do not call it while a CUDA graph is captured. `options` may be NULL: all zeros.
 * WYVERN_BAD_INPUT for an illegal problem and for a plan that does not compute it,
 * WYVERN_UNAVAILABLE where a compiler is missing or no template fits the device. */
WYVERN_C_API wyvern_status wyvern_prepare(wyvern_runtime* runtime, const wyvern_device* device,
                                          const wyvern_problem* problem,
                                          const wyvern_prepare_options* options,
                                          wyvern_operator** op);
WYVERN_C_API void wyvern_operator_destroy(wyvern_operator* op);

/* Version 2. Begins to compile the kernels that wyvern_prepare() of the same arguments would
 * compile now, on a thread of the runtime, and returns: before the forward pass is prepared, for
 * the backward pass, whose kernels then take no further time. Loads nothing, so a CUDA graph may be
 * captured meanwhile. wyvern_prepare() waits for the kernels that it needs, and reports what went
 * wrong. Does nothing with WYVERN_POLICY_ON_MISS. Destroying the runtime and
 * wyvern_runtime_stop_tuning() wait for the plan that is being compiled. WYVERN_BAD_INPUT for an
 * illegal problem and for a plan in `options`. */
WYVERN_C_API wyvern_status wyvern_compile_ahead(wyvern_runtime* runtime,
                                                const wyvern_device* device,
                                                const wyvern_problem* problem,
                                                const wyvern_prepare_options* options);

/* Version 2. 1 where the operator was prepared with WYVERN_POLICY_BACKGROUND and its problem has
 * been tuned since, so that wyvern_prepare() returns a better one, in milliseconds; else, and for
 * NULL, 0. The operator remains valid, inside a captured graph too. Reads one number without a
 * lock: cheap enough to call before each launch. */
WYVERN_C_API int wyvern_operator_is_outdated(const wyvern_operator* op);
/* Version 2. Waits until all background tuning is done, but at most `seconds` (0: does not wait;
 * infinity: no limit), and writes the number of problems left to tune to `left`, which may be
 * NULL. */
WYVERN_C_API wyvern_status wyvern_runtime_wait_for_tuning(wyvern_runtime* runtime, double seconds,
                                                          size_t* left);
/* Version 2. Stops the tuning in progress within some seconds and keeps its measurements; the
 * runtime tunes nothing and compiles nothing ahead from then on. For the end of a program that does
 * not destroy its runtime; destroying it does the same. */
WYVERN_C_API wyvern_status wyvern_runtime_stop_tuning(wyvern_runtime* runtime);

/* Bytes of device memory that a launch needs besides its tensors. */
WYVERN_C_API wyvern_status wyvern_operator_workspace_bytes(const wyvern_operator* op,
                                                           size_t* bytes);

typedef enum wyvern_origin {
  WYVERN_ORIGIN_EXACT = 1,   /* the plan tuned for this problem key */
  WYVERN_ORIGIN_NEAREST = 2, /* the winner of the nearest tuned problem, with other counts of tokens
                                or sequences, heads or options; or one of another driver */
  WYVERN_ORIGIN_DEFAULT = 3, /* nothing tuned */
  WYVERN_ORIGIN_GIVEN = 4    /* wyvern_prepare_options.plan */
} wyvern_origin;

/* Where the plan came from: a wyvern_origin. */
WYVERN_C_API wyvern_status wyvern_operator_origin(const wyvern_operator* op, int32_t* origin);
/* The plan as JSON, [{"template": id, "config": "BT=64,..."}...], its kernels in order. Lives as
 * long as the operator. */
WYVERN_C_API wyvern_status wyvern_operator_plan(const wyvern_operator* op, const char** json);
/* The operator's tensors, as wyvern_problem_tensors() does. */
WYVERN_C_API wyvern_status wyvern_operator_tensors(const wyvern_operator* op,
                                                   wyvern_tensor_spec* specs, size_t spec_size,
                                                   size_t capacity, size_t* count);

/* A tensor of a launch. */
typedef struct wyvern_tensor {
  const char* name; /* as in wyvern_tensor_spec */
  void* data; /* on the operator's device, aligned to 16 bytes; NULL: there is no such tensor, or
                 it has no elements */
  const int64_t* shape;   /* `rank` extents; NULL where rank is 0 */
  const int64_t* strides; /* in elements; NULL: contiguous (row-major; a dimension of extent 1 may
                             have any stride). Where `strided` of its wyvern_tensor_spec is 1
                             (version 2), a tensor [B, T, ...] may have rows of tokens at equal
                             distances of a multiple of 16 bytes below 2^40, each row contiguous,
                             sequences of a batch at T distances. A launch neither reads nor writes
                             between rows; between those that it writes may be rows at the same
                             distances, no others. Slots of a pool [slots, ...] may be strided
                             likewise */
  int32_t dtype;          /* a wyvern_dtype */
  int32_t rank;
} wyvern_tensor;

/* Version 2. Writes 1 to `takes` where a launch of the operator accepts this tensor as it is, by
 * its name, dtype, shape, strides and address; else 0. `tensor_size` is sizeof(wyvern_tensor). */
WYVERN_C_API wyvern_status wyvern_operator_takes(const wyvern_operator* op,
                                                 const wyvern_tensor* tensor, size_t tensor_size,
                                                 int32_t* takes);

typedef struct wyvern_launch {
  size_t struct_size;
  size_t tensor_size; /* sizeof(wyvern_tensor): the interval of `tensors` in bytes */
  /* Each present tensor of the operator once, in any order. The order of wyvern_operator_tensors()
   * is the fastest. */
  const wyvern_tensor* tensors;
  size_t tensor_count;
  /* Device memory of at least wyvern_operator_workspace_bytes(), aligned to 256 bytes, that no
   * other launch in flight uses. Its content need not be set. NULL where 0 bytes are needed. */
  void* workspace;
  size_t workspace_bytes;
  void* stream; /* a CUstream of the operator's device; NULL: the default stream */
  /* Optional host copy of cu_seqlens, N + 1 entries, which the launch checks in full. Without it a
   * GPU's kernels clamp cu_seqlens to [0, T]. */
  const int64_t* cu_seqlens_host;
  size_t cu_seqlens_host_count;
  /* Version 2. What wyvern_last_error() calls the tensor of this name, where the caller's own
   * interface has other names: the argument or another text that lives forever. Called only where
   * the launch fails. NULL: its name. wyvern_stage_launch() ignores it. */
  const char* (*shown_name)(const char* name);
} wyvern_launch;

#define WYVERN_LAUNCH_INIT {sizeof(wyvern_launch), sizeof(wyvern_tensor), 0, 0, 0, 0, 0, 0, 0, 0}

/* Enqueues the pass on the stream; on the CPU runs it. Allocates nothing, takes no lock,
 * synchronizes nothing; legal inside CUDA graph capture. Tensors must stay valid until the work is
 * done, the structs and their arrays only until this returns. A tensor that the launch writes (an
 * output, a state updated in place) must not share memory with another tensor or the workspace.
 * WYVERN_BAD_INPUT, before it launches anything, for a tensor that is missing, unknown, given twice
 * or wrong, for a workspace that is too small or not aligned, and for tensors that share memory;
 * WYVERN_UNAVAILABLE where the driver refuses. It cannot check that pointers lead to device memory
 * as large as the shapes say: the caller must make sure. */
WYVERN_C_API wyvern_status wyvern_operator_launch(const wyvern_operator* op,
                                                  const wyvern_launch* launch);

/* ---- Stages ---- */

/* Version 2. A stage of the chunked form on its own, one kernel. Never changes. */
typedef struct wyvern_stage wyvern_stage;

/* Version 2. Prepares the stage `name` ("solve_tril"; `wyvern stages` lists them,
 * templates/README.md says what their tensors mean) for the problem's dimensions, dtypes and
 * options, by its default config for the problem's chunk_size (64 where it is unset). It sums gates
 * as they are. Else as wyvern_prepare(). WYVERN_BAD_INPUT for a stage that the device has no kernel
 * of, and for one that cannot run alone. */
WYVERN_C_API wyvern_status wyvern_prepare_stage(wyvern_runtime* runtime,
                                                const wyvern_device* device,
                                                const wyvern_problem* problem, const char* name,
                                                wyvern_stage** stage);
WYVERN_C_API void wyvern_stage_destroy(wyvern_stage* stage);
/* Version 2. The stage's tensors, as wyvern_problem_tensors() does; the names live as long as the
 * stage. */
WYVERN_C_API wyvern_status wyvern_stage_tensors(const wyvern_stage* stage,
                                                wyvern_tensor_spec* specs, size_t spec_size,
                                                size_t capacity, size_t* count);
/* Version 2. Writes 1 to `takes` where a launch of the stage accepts this tensor as it is, by its
 * name, dtype, shape, strides and address, whatever the others are; else 0: it accepts a copy as
 * wyvern_stage_tensors() describes. WYVERN_BAD_INPUT for a name that no tensor of the stage has.
 * `tensor_size` is sizeof(wyvern_tensor). */
WYVERN_C_API wyvern_status wyvern_stage_takes(const wyvern_stage* stage,
                                              const wyvern_tensor* tensor, size_t tensor_size,
                                              int32_t* takes);
/* Version 2. As wyvern_operator_launch(), but a stage ignores workspace and cu_seqlens_host. */
WYVERN_C_API wyvern_status wyvern_stage_launch(const wyvern_stage* stage,
                                               const wyvern_launch* launch);

/* ---- Folds ---- */

/* Version 2. Whether a summary, with `transition` (1) or not (0), and the forward pass `problem`
 * behind it are to share segments: the chunk_size and segment_chunks to set in both, by which their
 * default plans cost less than those of both without; 0 and 0 where none do. Takes milliseconds,
 * compiles nothing. WYVERN_BAD_INPUT for a problem that may not have segment_chunks. */
WYVERN_C_API wyvern_status wyvern_shared_segments(const wyvern_device* device,
                                                  const wyvern_problem* problem, int32_t transition,
                                                  int64_t* chunk_size, int64_t* segment_chunks);

/* Version 2. What ranges of tokens do to a state, from range to range in order (context
 * parallelism): the state that enters each, or the gradient of the one that leaves it. Never
 * changes. <wyvern/runtime.hpp> (Fold) defines what is computed. */
typedef struct wyvern_fold wyvern_fold;

typedef struct wyvern_fold_options {
  size_t struct_size;
  int64_t ranges; /* of all ranks, 1 to 65535 */
  int64_t HV;     /* value heads, of a dense batch times B */
  int64_t K;
  int64_t V;
  int64_t transition; /* 1: each summary has K more columns, M; 0: R alone */
} wyvern_fold_options;

#define WYVERN_FOLD_OPTIONS_INIT {sizeof(wyvern_fold_options), 0, 0, 0, 0, 0}

/* Version 2. Prepares a fold for both directions. WYVERN_BAD_INPUT for an option out of range; else
 * as wyvern_prepare(). */
WYVERN_C_API wyvern_status wyvern_prepare_fold(wyvern_runtime* runtime, const wyvern_device* device,
                                               const wyvern_fold_options* options,
                                               wyvern_fold** fold);
WYVERN_C_API void wyvern_fold_destroy(wyvern_fold* fold);
/* Version 2. Enqueues the fold on the launch's stream; on the CPU runs it. `backwards` 0: states;
 * 1: gradients. The tensors, contiguous: "summaries" [ranges,HV,K,V] (V+K with transition), fp32,
 * and "order" [ranges], int32, each range once, are read, "states" [ranges,HV,K,V], fp32, is
 * written. Workspace, cu_seqlens_host and shown_name are ignored. Else as
 * wyvern_operator_launch(). */
WYVERN_C_API wyvern_status wyvern_fold_launch(const wyvern_fold* fold, const wyvern_launch* launch,
                                              int32_t backwards);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* WYVERN_WYVERN_H */
