//! Traces: a program's requests to its allocator, in the bench's format (`traces/FORMAT.md`),
//! written while it runs.
//!
//! Text gathers in memory and goes to the file in pieces of whole lines, each its own zstd frame:
//! every written piece stays readable, even if the writer dies. In the process (`trace:`), requests
//! add lines under one lock and a thread of ours writes; `gruyere record` writes from outside.
//! outside.

use crate::file;
use crate::signals::without_signals;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The longest that a line waits in memory (plus the time of writing).
const INTERVAL: Duration = Duration::from_millis(200);
/// Text (bytes) at which requests wake the writer early, and at which they write themselves: a disk
/// slower than the program must not fill the host's memory.
const EARLY: usize = 1 << 20;
const MOST: usize = 64 << 20;
/// zstd's level: as fast as a disk.
const LEVEL: i32 = 3;

/// The lines of a trace, and the blocks live in it.
#[derive(Debug, Default)]
pub struct Lines {
    text: String,
    ids: HashMap<u64, u64>,
    last: u64,
}

impl Lines {
    /// Adds a block handed out. If a block lies there already, its free was missed: adds that
    /// first.
    pub fn malloc(&mut self, address: u64, size: u64, device: u32, stream: u64) {
        self.free(address);
        self.last += 1;
        self.ids.insert(address, self.last);
        let id = self.last;
        self.line(format_args!("a {id} {size} {device} {stream}"));
    }

    /// Adds the free of the block at `address`. Returns false and writes nothing if none is live
    /// there.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(id) = self.ids.remove(&address) else { return false };
        self.line(format_args!("f {id}"));
        true
    }

    /// Adds a use of the block at `address` by `stream`. Returns false and writes nothing if none
    /// is live there.
    pub fn record_stream(&mut self, address: u64, stream: u64) -> bool {
        let Some(&id) = self.ids.get(&address) else { return false };
        self.line(format_args!("r {id} {stream}"));
        true
    }

    /// Adds a mark: one line of plain text.
    pub fn mark(&mut self, text: &str) {
        let text: String =
            text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(1000).collect();
        self.line(format_args!("m {text}"));
    }

    /// Whether a block is live at `address`.
    pub fn is_live(&self, address: u64) -> bool {
        self.ids.contains_key(&address)
    }

    /// The addresses of the live blocks.
    pub fn live(&self) -> impl Iterator<Item = u64> {
        self.ids.keys().copied()
    }

    /// Text waiting to be written (bytes).
    pub fn waiting(&self) -> usize {
        self.text.len()
    }

    /// Takes the waiting text.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "{line}");
    }
}

/// A stream's name in a trace: the default stream is 0 on all devices; the names of others include
/// the device.
pub fn stream_name(device: u32, stream: u32) -> u64 {
    if stream == 0 { 0 } else { u64::from(device) << 32 | u64::from(stream) }
}

/// A trace's file.
#[derive(Debug)]
pub struct TraceFile {
    file: File,
    /// Bytes of whole pieces.
    good: u64,
    bytes: u64,
}

impl TraceFile {
    /// Creates the file (mode 0600), or empties an existing one. It is compressed whatever its
    /// name: readers look at the content.
    ///
    /// # Errors
    /// The system's error; another process writes a trace to the file.
    pub fn create(path: &Path) -> io::Result<TraceFile> {
        let file = file::open_lasting(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                let reason = "another process writes a trace to it (%p in the name stands for the \
                              pid, %r for the rank)";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, reason));
            }
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
        }
        file.set_len(0)?;
        Ok(TraceFile { file, good: 0, bytes: 0 })
    }

    /// Appends whole lines. Removes a piece that could not be written whole.
    ///
    /// # Errors
    /// The system's error from writing.
    pub fn write(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let piece = zstd::bulk::compress(text.as_bytes(), LEVEL)?;
        if self.good.saturating_add(piece.len() as u64) > file::limit() {
            // Beyond the process's file size limit a write raises a signal, not an error.
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                "the process's limit on files (`ulimit -f`) is reached",
            ));
        }
        if let Err(error) = self.file.write_all(&piece) {
            self.file.set_len(self.good)?;
            self.file.seek(SeekFrom::End(0))?;
            return Err(error);
        }
        self.good += piece.len() as u64;
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// Bytes of the file, and of the text in it.
    pub fn lengths(&self) -> (u64, u64) {
        (self.good, self.bytes)
    }
}

/// The name in `trace:`, with `%p` replaced by the pid, `%r` by the rank (0 if there is none) and
/// `%%` by a percent sign.
pub fn expand(name: &Path, pid: u64, rank: Option<u64>) -> PathBuf {
    let text = name.to_string_lossy();
    let mut out = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (c, rest.clone().next()) {
            ('%', Some('p')) => _ = write!(out, "{pid}"),
            ('%', Some('r')) => _ = write!(out, "{}", rank.unwrap_or(0)),
            ('%', Some('%')) => out.push('%'),
            _ => {
                out.push(c);
                continue;
            }
        }
        rest.next();
    }
    out.into()
}

/// This process's trace.
#[derive(Debug)]
pub struct Tracer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    lines: Mutex<Lines>,
    /// Locked before `lines`, never after; `None`: writing has ended.
    file: Mutex<Option<TraceFile>>,
    /// Whether the writer must end.
    ends: Mutex<bool>,
    wake: Condvar,
}

impl Inner {
    fn flush(&self) {
        let mut file = self.file.lock();
        let text = self.lines.lock().take();
        let Some(open) = &mut *file else { return };
        if let Err(error) = open.write(&text) {
            log::error!(
                "trace: {}: {error}; what was written until now can be read, and nothing more is",
                self.path.display()
            );
            *file = None;
        }
    }

    fn add(&self, line: impl FnOnce(&mut Lines)) {
        let waiting = {
            let mut lines = self.lines.lock();
            line(&mut lines);
            lines.waiting()
        };
        if waiting > MOST {
            self.flush();
        } else if waiting > EARLY {
            self.wake.notify_one();
        }
    }
}

impl Tracer {
    /// Begins a trace. If the file can't be written, returns `None` and logs a line.
    pub fn start(path: &Path) -> Option<Tracer> {
        let inner = Inner {
            path: path.to_owned(),
            lines: Mutex::default(),
            file: Mutex::new(None),
            ends: Mutex::new(false),
            wake: Condvar::new(),
        };
        let inner = Arc::new(inner);
        let writer = inner.clone();
        let started = TraceFile::create(path).and_then(|file| {
            *inner.file.lock() = Some(file);
            without_signals(|| {
                std::thread::Builder::new()
                    .name("gruyere-trace".to_owned())
                    .spawn(move || write_until_the_end(&writer))
            })
        });
        match started {
            Ok(_) => Some(Tracer(inner)),
            Err(error) => {
                log::error!("trace: {}: {error}; no trace is written", path.display());
                None
            }
        }
    }

    /// Notes a block handed out.
    pub fn malloc(&self, address: u64, size: u64, device: u32, stream: u32) {
        self.0.add(|lines| lines.malloc(address, size, device, stream_name(device, stream)));
    }

    /// Notes that the block at `address`, if any, is about to be freed.
    pub fn free(&self, address: u64) {
        self.0.add(|lines| _ = lines.free(address));
    }

    /// Notes a use of the block at `address` by a stream.
    pub fn record_stream(&self, address: u64, device: u32, stream: u32) {
        self.0.add(|lines| _ = lines.record_stream(address, stream_name(device, stream)));
    }

    /// Marks the end of a step.
    pub fn step(&self) {
        self.0.add(|lines| lines.mark("step"));
    }

    /// Writes the waiting text.
    pub fn flush(&self) {
        self.0.flush();
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        *self.0.ends.lock() = true;
        self.0.wake.notify_all();
        self.0.flush();
        *self.0.file.lock() = None;
    }
}

fn write_until_the_end(inner: &Inner) {
    let mut ends = inner.ends.lock();
    while !*ends {
        inner.wake.wait_for(&mut ends, INTERVAL);
        parking_lot::MutexGuard::unlocked(&mut ends, || inner.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(path: &Path) -> String {
        String::from_utf8(zstd::stream::decode_all(File::open(path).unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn lines_are_those_of_the_format() {
        let mut lines = Lines::default();
        lines.malloc(512, 100, 0, 0);
        lines.malloc(1024, 7, 1, stream_name(1, 3));
        assert!(lines.record_stream(512, 9) && !lines.record_stream(5, 9));
        lines.mark("step");
        lines.mark("two\nlines");
        lines.malloc(512, 8, 0, 0);
        assert!(lines.free(1024) && !lines.free(1024) && lines.is_live(512));
        assert_eq!(
            lines.take(),
            "a 1 100 0 0\na 2 7 1 4294967299\nr 1 9\nm step\nm two lines\nf 1\na 3 8 0 0\nf 2\n"
        );
        assert_eq!(lines.waiting(), 0);
    }

    #[test]
    fn a_trace_is_whole_after_each_flush_and_belongs_to_one_writer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.trace.zst");
        let tracer = Tracer::start(&path).unwrap();
        for n in 0..1000 {
            tracer.malloc(n << 9, n, 0, 0);
        }
        tracer.flush();
        assert_eq!(text_of(&path).lines().count(), 1000);
        assert!(Tracer::start(&path).is_none(), "two writers would mix their lines");
        tracer.free(0);
        tracer.step();
        // Without a flush: the writer's own thread writes.
        let begun = std::time::Instant::now();
        while text_of(&path).lines().count() < 1002 {
            assert!(begun.elapsed() < Duration::from_secs(20), "a line stayed in memory");
            std::thread::sleep(Duration::from_millis(10));
        }
        tracer.free(512);
        drop(tracer);
        assert!(text_of(&path).ends_with("f 1\nm step\nf 2\n"));
        assert!(Tracer::start(&path).is_some(), "the lock goes with its holder");
        assert!(Tracer::start(Path::new("/no/such/folder/x")).is_none());
    }

    #[test]
    fn names_have_the_pid_and_the_rank() {
        let name = |text: &str, rank| expand(Path::new(text), 42, rank).display().to_string();
        assert_eq!(name("/t/%p-%r.zst", Some(3)), "/t/42-3.zst");
        assert_eq!(name("100%%/%x/%", None), "100%/%x/%");
        assert_eq!(name("%r", None), "0");
    }
}
