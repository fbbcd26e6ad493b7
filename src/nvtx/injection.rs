//! The protocol between a program and a tool injected into it (NVTX 3, after NVIDIA's headers
//! `nvtxInit.h`, `nvtxTypes.h` and `nvtxExtInit.h`).
//!
//! A profiler names its library in `NVTX_INJECTION64_PATH`. We load it and call its
//! `InitializeInjectionNvtx2` with a function that returns tables of slots; the tool writes its
//! functions into them. Extensions (counters) have their own initialiser,
//! `InitializeInjectionNvtxExtension`. Each library of a process attaches by itself, so torch's
//! NVTX and ours are two clients of one tool.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicIsize, AtomicPtr, Ordering};

/// The version of the protocol and of the structures here.
const NVTX_VERSION: u16 = 3;
/// The modules' tables, by number (`NvtxCallbackModule`): the slots of each, the unused first one
/// included. Tools ask for all of them.
const MODULE_SLOTS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const CORE2: usize = 5;
const MOST_SLOTS: usize = 16;

/// `NvtxCallbackIdCore2`.
#[derive(Clone, Copy)]
enum Core2 {
    Mark = 1,
    RangePush = 4,
    RangePop = 5,
    NameCategory = 8,
    RegisterString = 10,
    DomainCreate = 12,
}

/// The counters extension, its layout, and its slots; the first two are `nvtxCounterRegister` and
/// `nvtxCounterSampleInt64`.
const COUNTERS_MODULE: u16 = 4;
const COUNTERS_COMPATIBLE: u16 = 0x0102;
const COUNTER_SLOTS: usize = 63;
const REGISTER: usize = 0;
const SAMPLE_INT64: usize = 1;
/// `NVTX_PAYLOAD_ENTRY_TYPE_INT64` and `NVTX_SCOPE_CURRENT_SW_PROCESS`.
const INT64: u64 = 17;
const PROCESS_SCOPE: u64 = 21;

/// A slot for a tool's function.
///
/// ```text
/// state   meaning          changed by
/// null    not wanted       -> a function: the tool, while its initialiser runs (or later: it may
///                          attach and detach)
/// other   to be called     -> another, or null: the tool
/// ```
type Slot = AtomicPtr<c_void>;

const fn slots<const N: usize>() -> [Slot; N] {
    [const { AtomicPtr::new(std::ptr::null_mut()) }; N]
}

static SLOTS: [[Slot; MOST_SLOTS]; 7] = [const { slots() }; 7];
/// The tool's view: by module, pointers to the slots and a null at the end.
static TABLES: [[AtomicPtr<Slot>; MOST_SLOTS + 1]; 7] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST_SLOTS + 1] }; 7];
/// As [`SLOTS`], for the counters extension: 0 not wanted, else a function.
static COUNTERS: [AtomicIsize; COUNTER_SLOTS] = [const { AtomicIsize::new(0) }; COUNTER_SLOTS];

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    tables: unsafe extern "C" fn(c_int, *mut *const AtomicPtr<Slot>, *mut c_uint) -> c_int,
}

static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), tables: module_table };

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set: extern "C" fn(u32),
}

static VERSION_INFO: VersionInfo = VersionInfo {
    size: size_of::<VersionInfo>(),
    version: NVTX_VERSION as u32,
    reserved: 0,
    set: ignore,
};

extern "C" fn ignore(_version: u32) {}

unsafe extern "C" fn module_table(
    module: c_int,
    table: *mut *const AtomicPtr<Slot>,
    size: *mut c_uint,
) -> c_int {
    let module = match usize::try_from(module) {
        Ok(module @ 1..7) => module,
        _ => return 0,
    };
    // SAFETY: the tool passes addresses to write to, or null where it does not want the value.
    unsafe {
        if !size.is_null() {
            *size = MODULE_SLOTS[module] as c_uint;
        }
        if !table.is_null() {
            *table = TABLES[module].as_ptr();
        }
    }
    1
}

/// `NvtxGetExportTableFunc_t`.
extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION_INFO).cast(),
        _ => std::ptr::null(),
    }
}

/// `nvtxExtModuleSegment_t`.
#[repr(C)]
struct Segment {
    id: usize,
    slots: usize,
    functions: *const AtomicIsize,
}

/// `nvtxExtModuleInfo_t`.
#[repr(C)]
struct Module {
    version: u16,
    size: u16,
    id: u16,
    compatible: u16,
    segments: usize,
    segment: *mut Segment,
    export: *const c_void,
    information: *const c_void,
}

/// `nvtxEventAttributes_t`, version 2 of the structure.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

/// `nvtxCounterAttr_t`.
#[repr(C)]
struct CounterAttributes {
    size: usize,
    schema: u64,
    name: *const c_char,
    description: *const c_char,
    scope: u64,
    semantics: *const c_void,
    id: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48 && size_of::<Module>() == 40);
const _: () = assert!(size_of::<CounterAttributes>() == 56 && size_of::<VersionInfo>() == 24);

/// A handle of the tool's.
#[derive(Clone, Copy, Debug)]
pub struct Handle(*const c_void);

// SAFETY: handles are opaque names; NVTX lets every thread use them.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The look of an event.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Its text, registered.
    pub message: Handle,
    /// Its category.
    pub category: u32,
    /// ARGB.
    pub color: u32,
}

/// An injected tool.
#[derive(Debug)]
pub struct Tool {
    domain: Handle,
    /// Whether it takes counters.
    pub counts: bool,
}

/// The function in a slot of CORE2.
fn core2(id: Core2) -> Option<*mut c_void> {
    let function = SLOTS[CORE2][id as usize].load(Ordering::Acquire);
    (!function.is_null()).then_some(function)
}

fn counter(id: usize) -> Option<isize> {
    Some(COUNTERS[id].load(Ordering::Acquire)).filter(|&function| function != 0)
}

impl Tool {
    /// Loads the tool at `path` and lets it attach; `domain` names our events' domain.
    ///
    /// # Errors
    /// The library can't be loaded, is not a tool, or declines. It stays loaded then: it may have
    /// left something behind.
    pub fn attach(path: &Path, domain: &CStr) -> Result<Tool, String> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| "the path has a NUL".to_owned())?;
        // SAFETY: `name` is NUL-terminated. Loading runs the library's initialisers: naming a tool
        // asks for that.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) };
        if library.is_null() {
            // SAFETY: dlerror's string belongs to this thread and stands until its next call of the
            // dl family.
            let reason = unsafe { libc::dlerror() };
            // SAFETY: not null, and NUL-terminated.
            let text = (!reason.is_null())
                .then(|| unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned());
            return Err(text.unwrap_or_else(|| "cannot be loaded".to_owned()));
        }
        // SAFETY: a handle that is open, and NUL-terminated names.
        let symbol = |name: &CStr| unsafe { libc::dlsym(library, name.as_ptr()) };
        let start = symbol(c"InitializeInjectionNvtx2");
        if start.is_null() {
            return Err("has no InitializeInjectionNvtx2: it is not an NVTX tool".to_owned());
        }
        for (module, table) in TABLES.iter().enumerate() {
            for (slot, place) in SLOTS[module][..MODULE_SLOTS[module]].iter().zip(table).skip(1) {
                place.store(std::ptr::from_ref(slot).cast_mut(), Ordering::Release);
            }
        }
        type Start = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
        // SAFETY: that symbol of an NVTX tool has this type.
        let start: Start = unsafe { std::mem::transmute(start) };
        // SAFETY: as the protocol has it; our tables are statics.
        if unsafe { start(export_table) } == 0 {
            return Err("declined (InitializeInjectionNvtx2 returned 0)".to_owned());
        }
        let Some(create) = core2(Core2::DomainCreate) else {
            return Err("does not support domains".to_owned());
        };
        // SAFETY: that slot holds a function of this type; `domain` is NUL-terminated.
        let domain = unsafe {
            let create: unsafe extern "C" fn(*const c_char) -> *const c_void =
                std::mem::transmute(create);
            Handle(create(domain.as_ptr()))
        };
        Ok(Tool { domain, counts: start_counters(symbol(c"InitializeInjectionNvtxExtension")) })
    }

    /// Registers a text.
    pub fn register(&self, text: &CStr) -> Handle {
        let Some(function) = core2(Core2::RegisterString) else { return Handle(std::ptr::null()) };
        // SAFETY: that slot holds a function of this type; `text` is NUL-terminated; the domain is
        // the tool's.
        unsafe {
            let register: unsafe extern "C" fn(*const c_void, *const c_char) -> *const c_void =
                std::mem::transmute(function);
            Handle(register(self.domain.0, text.as_ptr()))
        }
    }

    /// Names a category.
    pub fn name_category(&self, category: u32, name: &CStr) {
        if let Some(function) = core2(Core2::NameCategory) {
            // SAFETY: as in `register`.
            unsafe {
                let name_it: unsafe extern "C" fn(*const c_void, u32, *const c_char) =
                    std::mem::transmute(function);
                name_it(self.domain.0, category, name.as_ptr());
            }
        }
    }

    fn attributes(look: Look, payload: u64) -> Attributes {
        Attributes {
            version: NVTX_VERSION,
            size: size_of::<Attributes>() as u16,
            category: look.category,
            // NVTX_COLOR_ARGB
            color_type: 1,
            color: look.color,
            // NVTX_PAYLOAD_TYPE_UNSIGNED_INT64
            payload_type: 1,
            reserved: 0,
            payload,
            // NVTX_MESSAGE_TYPE_REGISTERED; a tool that registers no texts gets none.
            message_type: if look.message.0.is_null() { 0 } else { 3 },
            message: look.message.0,
        }
    }

    /// Marks an instant.
    pub fn mark(&self, look: Look, payload: u64) {
        if let Some(function) = core2(Core2::Mark) {
            let attributes = Self::attributes(look, payload);
            // SAFETY: that slot holds a function of this type, which reads the attributes.
            unsafe {
                let mark: unsafe extern "C" fn(*const c_void, *const Attributes) =
                    std::mem::transmute(function);
                mark(self.domain.0, &attributes);
            }
        }
    }

    /// Begins a range of this thread, inside its open ones.
    pub fn push(&self, look: Look, payload: u64) {
        if let Some(function) = core2(Core2::RangePush) {
            let attributes = Self::attributes(look, payload);
            // SAFETY: as in `mark`.
            unsafe {
                let push: unsafe extern "C" fn(*const c_void, *const Attributes) -> c_int =
                    std::mem::transmute(function);
                push(self.domain.0, &attributes);
            }
        }
    }

    /// Ends this thread's latest range.
    pub fn pop(&self) {
        if let Some(function) = core2(Core2::RangePop) {
            // SAFETY: that slot holds a function of this type.
            unsafe {
                let pop: unsafe extern "C" fn(*const c_void) -> c_int =
                    std::mem::transmute(function);
                pop(self.domain.0);
            }
        }
    }

    /// Makes a counter; 0 where the tool takes none.
    pub fn counter(&self, name: &CStr, description: &CStr) -> u64 {
        let Some(function) = counter(REGISTER) else { return 0 };
        let attributes = CounterAttributes {
            size: size_of::<CounterAttributes>(),
            schema: INT64,
            name: name.as_ptr(),
            description: description.as_ptr(),
            scope: PROCESS_SCOPE,
            semantics: std::ptr::null(),
            id: 0,
        };
        // SAFETY: that slot holds a function of this type, which reads the attributes.
        unsafe {
            let register: unsafe extern "C" fn(*const c_void, *const CounterAttributes) -> u64 =
                std::mem::transmute(function);
            register(self.domain.0, &attributes)
        }
    }

    /// Reports a counter's value.
    pub fn sample(&self, id: u64, value: u64) {
        if let Some(function) = counter(SAMPLE_INT64) {
            // SAFETY: that slot holds a function of this type.
            unsafe {
                let sample: unsafe extern "C" fn(*const c_void, u64, i64) =
                    std::mem::transmute(function);
                sample(self.domain.0, id, i64::try_from(value).unwrap_or(i64::MAX));
            }
        }
    }
}

/// Offers the tool our counters; returns whether it takes them. Tools from before NVTX 3.1 have no
/// `start`.
fn start_counters(start: *mut c_void) -> bool {
    if start.is_null() {
        return false;
    }
    let mut segment = Segment { id: 0, slots: COUNTER_SLOTS, functions: COUNTERS.as_ptr() };
    let mut module = Module {
        version: NVTX_VERSION,
        size: size_of::<Module>() as u16,
        id: COUNTERS_MODULE,
        compatible: COUNTERS_COMPATIBLE,
        segments: 1,
        segment: &mut segment,
        export: std::ptr::null(),
        information: std::ptr::null(),
    };
    // SAFETY: that symbol of an NVTX tool has this type; it reads the module while it runs, and the
    // slots are a static.
    let taken = unsafe {
        let start: unsafe extern "C" fn(*mut Module) -> c_int = std::mem::transmute(start);
        start(&mut module) != 0
    };
    taken && counter(REGISTER).is_some() && counter(SAMPLE_INT64).is_some()
}
