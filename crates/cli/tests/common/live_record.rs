//! A record of this process with a known state, and an exporter of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use gruyere_record::calls::DriverCall;
use gruyere_record::{BlockEntry, DeviceFacts, DeviceGauge, Record, RecordOptions, SHARDS};

/// Two devices, only the second used: 3 live blocks (8, 16 and 32 MiB), one pending of 4 MiB.
pub fn record(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 256,
        max_blocks: 4096,
        ..RecordOptions::default()
    };
    let facts =
        |n: u8| DeviceFacts { name: format!("Phantom {n}"), uuid: [n; 16], total_memory: 80 << 30 };
    let record: &'static Record =
        Box::leak(Box::new(Record::create(&options, &[facts(0), facts(1)])));
    let mut shard = record.shard(1, SHARDS as u32 - 1);
    for n in 0..5u64 {
        let size = 2 << (20 + n);
        let entry = BlockEntry {
            address: n << 30,
            size,
            requested: size - 100,
            lifetime: n as u8 % 4,
            device: 1,
            ..BlockEntry::default()
        };
        let slot = shard.block_insert(&entry);
        match n {
            0 => shard.block_remove(slot, size, size - 100, entry.lifetime, false),
            1 => shard.block_pending(slot, size, size - 100, entry.lifetime),
            _ => {}
        }
    }
    record.device(1).set(&[
        (DeviceGauge::Reserved, 112 << 20),
        (DeviceGauge::ReservedPeak, 120 << 20),
        (DeviceGauge::Limit, 1 << 30),
        (DeviceGauge::DriverCalls, 17),
        (DeviceGauge::HostWaitNanoseconds, 1_500_000_000),
        (DeviceGauge::Rung4Calls, 3),
        (DeviceGauge::Rung4Microseconds, 1500),
        (DeviceGauge::Lost, 28 << 20),
        (DeviceGauge::LargestRequest, 26 << 20),
        (DeviceGauge::LargestGrowing, 640 << 20),
        (DeviceGauge::OutOfMemories, 2),
    ]);
    record.latency(true, 3000);
    record.call_times(DriverCall::Map).expect("room").note(2 << 20, 3000);
    record
}

/// A serving `gruyere export`, until dropped.
pub struct Exporter {
    child: Child,
    /// Its address.
    pub address: String,
}

impl Exporter {
    /// Starts it on a free port.
    pub fn start(directory: &Path, more: &[&str]) -> Exporter {
        let mut child = Command::new(env!("CARGO_BIN_EXE_gruyere"))
            .args(["export", "--listen", "127.0.0.1:0", "--directory"])
            .arg(directory)
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command runs");
        let mut line = String::new();
        BufReader::new(child.stderr.take().expect("piped")).read_line(&mut line).expect("a line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Exporter { child, address }
    }

    /// Head and body of the answer.
    #[allow(dead_code)] // not of every test program
    pub fn get(&self, path: &str, accept: &str) -> (String, String) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n");
        let answer = ask(&self.address, request.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.to_owned(), body.to_owned())
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answer to these bytes.
pub fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("somebody listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    stream.write_all(request).expect("it is taken");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    String::from_utf8(answer).expect("text")
}

/// A copy of `record` as another program may write it: `change` alters its bytes, `owner` gets the
/// file, and the open file holds its lock. `None` if a file can't be given away, which needs root.
#[allow(dead_code)] // not of every test program
pub fn forged(
    record: &Record,
    path: &Path,
    owner: Option<u32>,
    change: impl FnOnce(&mut [u8]),
) -> Option<std::fs::File> {
    use std::os::fd::AsRawFd as _;
    let mut bytes = std::fs::read(record.path().expect("a file")).expect("read");
    change(&mut bytes);
    std::fs::write(path, bytes).expect("written");
    let file = std::fs::File::options().read(true).write(true).open(path).expect("opened");
    // SAFETY: zeros are a value of this C struct; a plain call on a descriptor.
    let locked = unsafe {
        let mut whole: libc::flock = std::mem::zeroed();
        whole.l_type = libc::F_WRLCK as libc::c_short;
        libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &whole)
    };
    assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
    if owner.is_some() && std::os::unix::fs::chown(path, owner, owner).is_err() {
        return None;
    }
    Some(file)
}

/// The word at `at` in a record's bytes.
#[allow(dead_code)] // not of every test program
pub fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize
}
