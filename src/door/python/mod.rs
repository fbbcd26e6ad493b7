//! Where in a Python program a request comes from (`blame:`): the frames of the calling thread, the
//! module of torch's that is running, and the phase, as a site of the record.
//!
//! [`interpreter`] reads the frames, with or without the interpreter's lock; [`known`] has the
//! stacks that were seen before, so that a repeated one costs the walk alone; [`modules`] the paths
//! of modules, which the package tells; [`autograd`] the forward that a backward belongs to, which
//! the native door's shim tells. A thread that runs neither Python nor a backward has no site.

pub mod autograd;
mod content;
mod grad;
mod interpreter;
mod known;
mod layout;
mod modules;
mod places;
mod stack;

use super::control::{GRUYERE_INVALID, GRUYERE_OK, GRUYERE_UNAVAILABLE};
use super::{fork, guarded};
use crate::heap::Sites;
use crate::record::Record;
use crate::record::sites::{DEPTH, FrameId, NewSite, Phase, SiteId};
use autograd::{Forwards, GruyereAutograd};
use interpreter::{Frame, Interpreter, Walk, mix};
use known::Known;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often the interpreter's frames are compared with what it says itself before they are given
/// up.
const TRIES: u32 = 4;
/// How long the end of the interpreter waits for those who read its frames.
const PATIENCE: Duration = Duration::from_millis(200);

/// The interpreter; looked for once. `None`: there is none that could be asked.
static INTERPRETER: OnceLock<Option<Interpreter>> = OnceLock::new();

/// Whether the interpreter's frames are what we think.
///
/// ```text
/// state      meaning                        changed by
/// UNTRIED    nobody has compared them       -> TRYING: the first who holds the lock
/// TRYING     somebody does                  -> TRUSTED, REFUSED, or UNTRIED again: that one
/// TRUSTED    they are                       -> ENDED: who says that the interpreter ends
/// REFUSED    they are not                   never
/// ENDED      the interpreter ends           never
/// ```
static TRUST: AtomicU8 = AtomicU8::new(UNTRIED);
const UNTRIED: u8 = 0;
const TRYING: u8 = 1;
const TRUSTED: u8 = 2;
const REFUSED: u8 = 3;
const ENDED: u8 = 4;

/// Who reads frames at this moment: raised before TRUST is looked at, so that whoever ends the
/// interpreter sees them, or they see that it ends. SeqCst, both.
static READING: AtomicU32 = AtomicU32::new(0);

/// The code object of `torch.nn.Module.__call__`, as the package tells: 0, then that for good.
static CALL: AtomicUsize = AtomicUsize::new(0);

/// The program has made an optimiser that no record knows of yet: set by the package's call, taken
/// back by who tells the record.
static OPTIMIZER: AtomicBool = AtomicBool::new(false);

/// The package has said that it is there: false, then true for good.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Whether the Python package serves this process.
pub(super) fn is_begun() -> bool {
    BEGUN.load(Ordering::Relaxed)
}

fn interpreter() -> Option<&'static Interpreter> {
    let find = || match Interpreter::find() {
        Ok(found) => Some(found),
        Err(reason) => {
            if let Some(reason) = reason {
                log::warn!(
                    "blame: blocks will not say where in the program they come from: {reason} \
                     (blame:off says nothing)"
                );
            }
            None
        }
    };
    INTERPRETER.get_or_init(find).as_ref()
}

/// Whether frames may be read; where that is not known yet, and the calling thread holds the lock,
/// it is found out.
#[cold]
fn is_trusted_now(python: &Interpreter) -> bool {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    if !python.holds_lock()
        || TRUST.compare_exchange(UNTRIED, TRYING, Ordering::SeqCst, Ordering::SeqCst).is_err()
    {
        return false;
    }
    let next = match python.check() {
        true => TRUSTED,
        false if TRIED.fetch_add(1, Ordering::Relaxed) + 1 < TRIES => UNTRIED,
        false => {
            log::warn!(
                "blame: blocks will not say where in the program they come from: the frames of \
                 this build of Python are not where they are in others of its version (blame:off \
                 says nothing)"
            );
            REFUSED
        }
    };
    let _ = TRUST.compare_exchange(TRYING, next, Ordering::SeqCst, Ordering::SeqCst);
    next == TRUSTED
}

/// Somebody reads frames; until it is dropped, the interpreter does not end.
struct Reading;

impl Reading {
    #[inline]
    fn begin(python: &Interpreter) -> Option<Self> {
        if TRUST.load(Ordering::Relaxed) == UNTRIED {
            is_trusted_now(python);
        }
        READING.fetch_add(1, Ordering::SeqCst);
        let reading = Self;
        (TRUST.load(Ordering::SeqCst) == TRUSTED).then_some(reading)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        READING.fetch_sub(1, Ordering::Release);
    }
}

/// What tells a heap where its requests come from.
pub(super) struct Program {
    python: &'static Interpreter,
    known: Known,
    forwards: Forwards,
}

/// A request, as far as it is told from others before a name is read.
struct Asked {
    /// The calling thread's stack, where there is one.
    stack: Option<Walk>,
    /// The site of the forward whose backward runs; `None`: none runs.
    backward: Option<SiteId>,
    /// Gradients are off.
    no_grad: bool,
}

impl Program {
    /// Of the interpreter that the process has by now. `None`: there is none that can be asked.
    pub(super) fn find() -> Option<Self> {
        let python = interpreter()?;
        Some(Self { python, known: Known::default(), forwards: Forwards::default() })
    }

    #[cold]
    #[inline(never)]
    fn learn(&self, record: &Record, asked: &Asked, key: u64) -> SiteId {
        if OPTIMIZER.load(Ordering::Relaxed) && OPTIMIZER.swap(false, Ordering::Relaxed) {
            // A site without blocks: that there is one is what it says.
            record.site(&NewSite { phase: Phase::Optimizer, ..NewSite::default() });
        }
        let stack: Vec<Frame> = match asked.stack {
            Some(_) => self.python.stack().into_iter().map(|at| self.python.frame(at)).collect(),
            None => Vec::new(),
        };
        let told = |frame: &Frame| record.frame(&frame.file, &frame.function, frame.line);
        let frames = stack.iter().filter(|frame| !places::is_plumbing(frame)).take(DEPTH);
        let mut frames: Vec<FrameId> = frames.map(told).collect();
        if asked.backward.is_some() && stack.first().is_none_or(places::is_engine) {
            frames.insert(0, record.frame("autograd", &autograd::name(), 0));
            frames.truncate(DEPTH);
        }
        let phase = match asked.backward {
            Some(_) => Phase::Backward,
            None => places::phase(&stack),
        };
        let site = record.site(&NewSite {
            frames: &frames,
            module: &modules::path(asked.stack.map_or(0, |walk| walk.argument)),
            phase,
            forward: asked.backward.unwrap_or(SiteId::NONE),
            // A backward runs with gradients off, and says nothing by it.
            no_grad: asked.no_grad && phase != Phase::Backward,
        });
        self.known.set(key, site);
        site
    }
}

impl Sites for Program {
    fn current(&self, record: &Record, bytes: u64) -> SiteId {
        guarded(SiteId::NONE, || self.site(record, bytes))
    }
}

impl Program {
    fn site(&self, record: &Record, bytes: u64) -> SiteId {
        let origin = autograd::origin();
        let reading = Reading::begin(self.python);
        let walk = reading.as_ref().map(|_| self.python.walk(CALL.load(Ordering::Relaxed)));
        let stack = walk.filter(|walk| walk.frames > 0);
        let backward = origin.as_ref().and_then(GruyereAutograd::backward_key);
        let backward = backward.map(|key| self.forwards.get(key));
        let asked = Asked { stack, backward, no_grad: grad::is_off() };
        if asked.stack.is_none() && asked.backward.is_none() {
            return SiteId::NONE;
        }
        let key = asked.key(origin.map_or(0, |origin| origin.kind));
        let site = self.known.get(key).unwrap_or_else(|| self.learn(record, &asked, key));
        if let Some(key) = origin.as_ref().and_then(|origin| origin.forward_key(bytes)) {
            self.forwards.set(key, site);
        }
        site
    }
}

impl Asked {
    /// What tells its site from others; `node`: the kind of the node that runs.
    fn key(&self, node: u64) -> u64 {
        let (hash, module) =
            self.stack.map_or((0, 0), |walk| (walk.hash, modules::number(walk.argument)));
        let forward = self.backward.map_or(0, |forward| u64::from(forward.0) + 1);
        let words = [module, node, forward << 1 | u64::from(self.no_grad)];
        words.into_iter().fold(hash, mix).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The Python package is there, and Gruyère is about to be torch's allocator: with `blame:auto`,
/// large blocks say where in the program they come from. `call` is the code object of
/// `torch.nn.Module.__call__`, which is kept for as long as the process lives, or NULL. To be
/// called by a thread that holds the interpreter's lock, from Python.
///
/// 0; -1: there is no interpreter here whose frames can be read, and the log says why.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_begin(call: *const c_void) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        BEGUN.store(true, Ordering::Relaxed);
        CALL.store(call as usize, Ordering::Relaxed);
        match interpreter().and_then(Reading::begin) {
            Some(_) => GRUYERE_OK,
            None => GRUYERE_UNAVAILABLE,
        }
    })
}

/// The interpreter is about to end: no frame is read from now on, nor when this returns.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_end() {
    if fork::is_forked_child() {
        return;
    }
    TRUST.store(ENDED, Ordering::SeqCst);
    let start = Instant::now();
    while READING.load(Ordering::SeqCst) != 0 && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
}

/// The program makes an optimiser: it trains.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_optimizer() {
    OPTIMIZER.store(true, Ordering::Relaxed);
}

/// The module object at `module` is in the one at `outer`, which calls it `name` (NULL: it is in
/// none, and has the name of its class), until `gruyere_blame_forget`, which is to be called before
/// that object's memory can be another's.
///
/// 0; -2: the name is NULL or no UTF-8.
///
/// # Safety
/// `name` is NULL, or a NUL-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gruyere_blame_module(
    module: *const c_void,
    outer: *const c_void,
    name: *const c_char,
) -> c_int {
    if fork::is_forked_child() {
        return GRUYERE_UNAVAILABLE;
    }
    if name.is_null() {
        return GRUYERE_INVALID;
    }
    guarded(GRUYERE_UNAVAILABLE, || {
        // SAFETY: the caller's promise.
        match unsafe { CStr::from_ptr(name) }.to_str() {
            Ok(name) => {
                modules::name(module as usize, outer as usize, name);
                GRUYERE_OK
            }
            Err(_) => GRUYERE_INVALID,
        }
    })
}

/// The module object at `module` is no more.
#[unsafe(no_mangle)]
pub extern "C" fn gruyere_blame_forget(module: *const c_void) {
    if !fork::is_forked_child() {
        guarded((), || modules::forget(module as usize));
    }
}
