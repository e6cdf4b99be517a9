/* The only XLA FFI target of tk_jax: call(text, *operands, *results) calls the TVM-FFI global function that `text` names.

   text is "name|order|scalars": order picks the kernel's tensors out of the buffers (-1 is None), a scalar is i<decimal> or
   f<the bits of a double in hexadecimal>: exact, and read alike in every locale. Each distinct text is read once and then found by its hash. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_PARAMETERS 64
#define BUCKETS 4096

typedef struct Call {
  struct Call* next;
  uint64_t hash;
  size_t size;
  char* text;      /* the whole text */
  char* name;      /* the kernel's name, zero terminated */
  int tensors;     /* kernel parameters that are tensors */
  int parameters;  /* tensors and scalars */
  int order[MAX_PARAMETERS];
  TVMFFIAny scalars[MAX_PARAMETERS];
  TVMFFIObjectHandle function;
  int64_t launches;
} Call;

static Call* table[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int fail(const char* kind, const char* what, const char* detail, size_t size) {
  char message[640];
  snprintf(message, sizeof message, "tk_jax: %s: %.*s", what, (int)(size > 480 ? 480 : size), detail);
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

/* The characters of a string argument, which TVM-FFI stores in one of four ways. */
static int string_of(const TVMFFIAny* value, TVMFFIByteArray* text) {
  switch (value->type_index) {
    case kTVMFFIStr:
      *text = *(const TVMFFIByteArray*)((const char*)value->v_obj + sizeof(TVMFFIObject));
      return 1;
    case kTVMFFISmallStr:
      text->data = value->v_bytes;
      text->size = value->small_str_len;
      return 1;
    case kTVMFFIRawStr:
      text->data = value->v_c_str;
      text->size = strlen(value->v_c_str);
      return 1;
    case kTVMFFIByteArrayPtr:
      *text = *(const TVMFFIByteArray*)value->v_ptr;
      return 1;
    default:
      return 0;
  }
}

/* Read "name|order|scalars" into a new entry; NULL where it is not of that form. */
static Call* parse(const TVMFFIByteArray* text, uint64_t hash) {
  Call* call = calloc(1, sizeof(Call));
  if (!call) return NULL;
  call->hash = hash;
  call->size = text->size;
  call->text = malloc(text->size);
  call->name = malloc(text->size + 1);
  if (!call->text || !call->name) goto bad;
  memcpy(call->text, text->data, text->size);
  memcpy(call->name, text->data, text->size);
  call->name[text->size] = 0;
  char* at = strchr(call->name, '|');
  if (!at) goto bad;
  *at++ = 0;
  while (*at && *at != '|') {
    char* end;
    if (call->tensors == MAX_PARAMETERS) goto bad;
    call->order[call->tensors++] = (int)strtol(at, &end, 10);
    if (end == at) goto bad;
    at = *end == ',' ? end + 1 : end;
  }
  call->parameters = call->tensors;
  if (*at++ != '|') goto bad;
  while (*at) {
    char* end;
    if (call->parameters == MAX_PARAMETERS) goto bad;
    TVMFFIAny* scalar = &call->scalars[call->parameters++];
    if (*at == 'f') {
      scalar->type_index = kTVMFFIFloat;
      scalar->v_uint64 = strtoull(at + 1, &end, 16);
    } else if (*at == 'i') {
      scalar->type_index = kTVMFFIInt;
      scalar->v_int64 = strtoll(at + 1, &end, 10);
    } else {
      goto bad;
    }
    if (end == at + 1) goto bad;
    at = *end == ',' ? end + 1 : end;
  }
  return call;
bad:
  free(call->text);
  free(call->name);
  free(call);
  return NULL;
}

static Call* find(const TVMFFIByteArray* text) {
  uint64_t hash = 14695981039346656037ull;
  for (size_t i = 0; i < text->size; ++i) hash = (hash ^ (unsigned char)text->data[i]) * 1099511628211ull;
  pthread_mutex_lock(&lock);
  Call** bucket = &table[hash % BUCKETS];
  Call* call = *bucket;
  while (call && (call->hash != hash || call->size != text->size || memcmp(call->text, text->data, text->size))) call = call->next;
  if (!call && (call = parse(text, hash))) {
    call->next = *bucket;
    *bucket = call;
  }
  pthread_mutex_unlock(&lock);
  return call;
}

static TVMFFIObjectHandle global_function(const char* name) {
  TVMFFIByteArray key = {name, strlen(name)};
  TVMFFIObjectHandle found = NULL;
  return TVMFFIFunctionGetGlobal(&key, &found) == 0 ? found : NULL;
}

/* The kernel's function. One that this process has not loaded yet (a deserialized program names it) is asked of Python. */
static int resolve(Call* call, TVMFFIObjectHandle* function) {
  *function = __atomic_load_n(&call->function, __ATOMIC_ACQUIRE);
  if (*function) return 0;
  TVMFFIObjectHandle found = global_function(call->name);
  if (!found) {
    TVMFFIObjectHandle load = global_function("tk_jax.load_kernel");
    if (!load) return fail("RuntimeError", "kernel is not loaded in this process", call->name, strlen(call->name));
    TVMFFIAny name, none;
    memset(&name, 0, sizeof name);
    memset(&none, 0, sizeof none);
    name.type_index = kTVMFFIRawStr;
    name.v_c_str = call->name;
    int failed = TVMFFIFunctionCall(load, &name, 1, &none);
    TVMFFIObjectDecRef(load);
    if (failed) return -1;
    found = global_function(call->name);
    if (!found) return fail("RuntimeError", "kernel is not loaded in this process", call->name, strlen(call->name));
  }
  if (__atomic_compare_exchange_n(&call->function, function, found, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    *function = found; /* the table keeps this reference for as long as the process lives */
  } else {
    TVMFFIObjectDecRef(found);
  }
  return 0;
}

EXPORT int __tvm_ffi_call(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  TVMFFIByteArray text;
  if (n < 1 || !string_of(args, &text)) return fail("TypeError", "the first argument must be a string", "call", 4);
  Call* call = find(&text);
  if(!call) fprintf(stderr,"n=%d type=%d %d %lx BAD %d [%.*s]\n", n,args[0].type_index,args[0].zero_padding,args[0].v_int64,(int)text.size,(int)text.size,text.data);
  if (!call) return fail("ValueError", "not a call", text.data, text.size);
  TVMFFIObjectHandle function;
  if (resolve(call, &function)) return -1;
  TVMFFIAny parameters[MAX_PARAMETERS];
  for (int i = 0; i < call->tensors; ++i) {
    int from = call->order[i];
    if (from >= n - 1) return fail("ValueError", "too few buffers", text.data, text.size);
    if (from < 0) {
      memset(&parameters[i], 0, sizeof parameters[i]);
    } else {
      parameters[i] = args[1 + from];
    }
  }
  for (int i = call->tensors; i < call->parameters; ++i) parameters[i] = call->scalars[i];
  if (TVMFFIFunctionCall(function, parameters, call->parameters, result)) return -1;
  __atomic_fetch_add(&call->launches, 1, __ATOMIC_RELAXED);
  return 0;
}

/* counts(reset): one line "name launches" for every text that was launched; sets the counters to zero where reset is not 0. */
EXPORT int __tvm_ffi_counts(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  int reset = n > 0 && args[0].v_int64 != 0;
  char* lines = NULL;
  size_t size = 0;
  FILE* out = open_memstream(&lines, &size);
  if (!out) return fail("MemoryError", "no memory for the counters", "", 0);
  pthread_mutex_lock(&lock);
  for (int i = 0; i < BUCKETS; ++i) {
    for (Call* call = table[i]; call; call = call->next) {
      int64_t launches = reset ? __atomic_exchange_n(&call->launches, 0, __ATOMIC_RELAXED) : __atomic_load_n(&call->launches, __ATOMIC_RELAXED);
      if (launches) fprintf(out, "%s %lld\n", call->name, (long long)launches);
    }
  }
  pthread_mutex_unlock(&lock);
  fclose(out);
  TVMFFIByteArray text = {lines, size};
  int failed = TVMFFIStringFromByteArray(&text, result);
  free(lines);
  return failed;
}
