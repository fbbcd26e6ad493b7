//! The record between processes: one writes at full speed or is killed, another reads.
//!
//! Not libtest's harness: this program is also the writer, started again with a role as its first
//! argument. What a kernel or a container does not permit (mounts, namespaces) is said to be
//! skipped, with the reason.

#[path = "../../../tests/common/skip.rs"]
mod skip;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use gruyere_record::reader::Cursor;
use gruyere_record::sweep::{Owners, State, read, sweep};
use gruyere_record::{
    BlockEntry, BlockSlot, DeviceFacts, DeviceGauge, EventKind, Reader, Record, RecordOptions,
    ShardWriter,
};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, directory] = &arguments[..] {
        let directory = Path::new(directory);
        match role.as_str() {
            "write" => return role_write(directory),
            "fork" => return role_fork(directory),
            "namespace" => return role_namespace(directory),
            "tiny" => return role_tiny(directory),
            "limit" => return role_limit(directory),
            "beside" => return role_beside(directory),
            _ => {}
        }
    }
    let tests: &[(&str, fn())] = &[
        ("ten_thousand_snapshots_of_a_busy_writer_hold_no_torn_value", ten_thousand_snapshots),
        ("a_writer_killed_anywhere_leaves_a_record_that_can_be_read", killed_writers),
        ("a_forked_child_neither_unlinks_nor_keeps_the_record_alive", forked_children),
        ("equal_pids_of_two_namespaces_do_not_collide", two_namespaces),
        ("a_full_tmpfs_raises_no_signal_and_loses_no_record", full_tmpfs),
        ("a_file_size_limit_raises_no_signal", file_size_limit),
        ("a_process_maps_no_record_but_its_own_not_even_to_sweep", nothing_is_mapped),
    ];
    // As libtest: words are filters, options are not ours.
    let filters: Vec<&String> =
        arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    for (name, test) in tests {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())) {
            println!("test {name} ...");
            test();
            println!("test {name} ... ok");
        }
    }
    ExitCode::SUCCESS
}

// ---- roles --------------------------------------------------------------------------------------

fn make(directory: &Path) -> &'static Record {
    let options = RecordOptions {
        directory: directory.to_owned(),
        ring_events: 4096,
        max_blocks: 1 << 16,
        kept: 100,
        ..RecordOptions::default()
    };
    let devices =
        [DeviceFacts { name: "Phantom".to_owned(), uuid: [3; 16], total_memory: 80 << 30 }];
    Box::leak(Box::new(Record::create(&options, &devices)))
}

/// Lifetime `n` has blocks of one size, so that counters of different moments show.
fn size_of_lifetime(lifetime: usize) -> u64 {
    512 * (lifetime as u64 + 1)
}

/// A block whose words follow from its address.
fn block(address: u64, lifetime: usize) -> BlockEntry {
    let size = size_of_lifetime(lifetime);
    let stream = (address >> 9) as u32 ^ 0x5555;
    let (step, capture) = (!stream, address as u8 ^ (address >> 9) as u8);
    BlockEntry {
        address,
        size,
        requested: size / 2,
        stream,
        step,
        device: 0,
        lifetime: lifetime as u8,
        capture,
        ..BlockEntry::default()
    }
}

/// Writes at full speed, for ever.
fn write_for_ever(record: &'static Record, mut shard: ShardWriter, first: u64) -> ! {
    let mut device = record.device(0);
    let mut slots = [BlockSlot::NONE; 256];
    let mut address = first;
    loop {
        for (n, slot) in slots.iter_mut().enumerate() {
            address += 512;
            let entry = block(address, n % 4);
            *slot = shard.block_insert(&entry);
            shard.event(
                EventKind::Malloc,
                entry.lifetime,
                entry.stream,
                address,
                address ^ 0xff,
                address * 3,
            );
            record.event(EventKind::Wait, 0, 1, entry.stream, address, address ^ 0xff, address * 3);
        }
        // Only one thread has this number, so one writer of the device's gauges.
        if first == 0 {
            let gauges = DeviceGauge::ALL.iter().map(|&gauge| (gauge, address + gauge as u64));
            device.set(&gauges.collect::<Vec<_>>());
        }
        for (n, slot) in slots.iter().enumerate() {
            let size = size_of_lifetime(n % 4);
            shard.block_pending(*slot, size, size / 2, (n % 4) as u8);
            shard.block_remove(*slot, size, size / 2, (n % 4) as u8, true);
        }
    }
}

fn role_write(directory: &Path) -> ExitCode {
    let record = make(directory);
    println!("{}", record.path().expect("a file").display());
    let second = record.shard(0, 9);
    std::thread::spawn(move || write_for_ever(record, second, 1 << 40));
    write_for_ever(record, record.shard(0, 1), 0)
}

/// Makes a record, forks a child that closes it and then sleeps, and waits to be killed.
fn role_fork(directory: &Path) -> ExitCode {
    let record = make(directory);
    let mut shard = record.shard(0, 0);
    shard.block_insert(&block(512, 0));
    // SAFETY: this process has one thread.
    if unsafe { libc::fork() } == 0 {
        // What a child should not do, and must survive: calls, and a close.
        shard.block_insert(&block(1024, 0));
        record.close();
        println!("child {}", std::process::id());
        std::thread::sleep(Duration::from_secs(60));
        return ExitCode::SUCCESS;
    }
    println!("{}", record.path().expect("a file").display());
    std::thread::sleep(Duration::from_secs(60));
    ExitCode::SUCCESS
}

/// Starts a writer as process 1 of a new pid namespace.
fn role_namespace(directory: &Path) -> ExitCode {
    // SAFETY: plain calls; the flags touch this process and its children only.
    let made = unsafe {
        libc::unshare(libc::CLONE_NEWPID) == 0
            || libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) == 0
    };
    if !made {
        println!("skipped: {}", std::io::Error::last_os_error());
        return ExitCode::SUCCESS;
    }
    let mut writer = dying_command("write", directory).spawn().expect("a writer");
    let _ = writer.wait();
    ExitCode::SUCCESS
}

/// Mounts a small tmpfs over `directory` in a mount namespace of its own and fills it through
/// records.
fn role_tiny(directory: &Path) -> ExitCode {
    // SAFETY: plain calls on C strings; the mount is in this process's own namespace.
    let mounted = unsafe {
        let user = libc::geteuid();
        let flags = libc::CLONE_NEWNS | if user == 0 { 0 } else { libc::CLONE_NEWUSER };
        let path = std::ffi::CString::new(directory.to_str().expect("text")).expect("no zeros");
        let nothing = std::ptr::null();
        libc::unshare(flags) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                nothing,
                libc::MS_REC | libc::MS_PRIVATE,
                nothing.cast(),
            ) == 0
            && libc::mount(
                c"none".as_ptr(),
                path.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                c"size=2m".as_ptr().cast(),
            ) == 0
    };
    if !mounted {
        println!("skipped: {}", std::io::Error::last_os_error());
        return ExitCode::SUCCESS;
    }
    let (mut made, mut first) = (Vec::new(), None);
    for n in 0..6u32 {
        let record = make(directory);
        first.get_or_insert(record);
        made.push(if record.path().is_some() { 'f' } else { 'm' });
        let mut shard = record.shard(0, n);
        let slots: Vec<BlockSlot> =
            (0..40_000u64).map(|n| shard.block_insert(&block(n * 512, 1))).collect();
        for n in 0..5000 {
            shard.event(EventKind::Malloc, 0, 0, n, n, n);
        }
        let reader = Reader::own(record).expect("a record");
        let kept = slots.iter().filter(|&&slot| slot != BlockSlot::NONE).count();
        assert_eq!(reader.blocks().entries.len(), kept);
        assert_eq!(reader.health().blocks_unrecorded, 40_000 - kept as u64);
        assert_eq!(record.live(0).0, 40_000 * 1024);
    }
    // A copy of the first finds no room either: the record itself stays.
    let first = first.expect("six of them");
    first.keep_moment().expect("memory");
    let left = first.leave_copy().expect("a file");
    first.close();
    assert_eq!((Some(&*left), left.exists()), (first.path(), true));
    println!("survived {}", made.iter().collect::<String>());
    ExitCode::SUCCESS
}

/// What is done at SIGBUS, and how many files named like records are mapped.
fn sigbus_and_maps() -> (usize, usize) {
    // SAFETY: zeros are a value of this C struct; only asks.
    let action = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action), 0);
        action.sa_sigaction
    };
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let paths = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| path));
    let records: std::collections::BTreeSet<&str> =
        paths.filter(|path| path.ends_with(".record")).collect();
    (action, records.len())
}

/// Sweeps and makes a record beside others: the handler that guards mappings of others' records was
/// never needed.
fn role_beside(directory: &Path) -> ExitCode {
    let before = sigbus_and_maps();
    assert_eq!(sweep(directory, Owners::Mine).removed, 1);
    let record = make(directory);
    assert_eq!(
        sigbus_and_maps(),
        (before.0, 1),
        "its own record is mapped, and no handler installed"
    );
    println!("survived");
    record.close();
    ExitCode::SUCCESS
}

/// Makes a record under a file size limit far below its size.
fn role_limit(directory: &Path) -> ExitCode {
    let limit = libc::rlimit { rlim_cur: 100 << 10, rlim_max: 100 << 10 };
    // SAFETY: a valid limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    let record = make(directory);
    assert!(record.path().is_none());
    let mut shard = record.shard(0, 0);
    for n in 0..10_000 {
        shard.block_insert(&block(n * 512, 1));
    }
    assert_eq!(record.live(0), (10_000 * 1024, 10_000 * 1024));
    assert_eq!(Reader::own(record).expect("private memory").blocks().entries.len(), 10_000);
    println!("survived");
    ExitCode::SUCCESS
}

// ---- the other side -----------------------------------------------------------------------------

/// This program in a role; it dies with us.
fn dying_command(role: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.arg(role).arg(directory);
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    };
    command
}

/// A process in a role, killed when dropped.
struct Role {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Role {
    fn start(role: &str, directory: &Path) -> Role {
        let mut child =
            dying_command(role, directory).stdout(Stdio::piped()).spawn().expect("a child");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Role { child, lines }
    }
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Counts of what could not be read whole.
#[derive(Debug, Default)]
struct Torn {
    shards: u32,
    gauges: u32,
    blocks: u64,
}

/// Reads everything once and checks every relation that the writer keeps.
fn check(reader: &Reader, cursor: &mut Cursor, deep: bool) -> Torn {
    let mut torn = Torn::default();
    let device = reader.device(0).expect("a device");
    torn.shards = device.torn_shards;
    torn.gauges = u32::from(device.torn_gauges);
    if device.torn_shards == 0 {
        for (lifetime, counts) in device.blocks[0].iter().enumerate() {
            let size = size_of_lifetime(lifetime);
            assert_eq!(counts.malloc_bytes, counts.mallocs * size, "torn: {counts:?}");
            assert_eq!(counts.malloc_requested * 2, counts.malloc_bytes, "torn: {counts:?}");
            assert_eq!(counts.free_bytes, counts.frees * size, "torn: {counts:?}");
            assert_eq!(counts.free_requested * 2, counts.free_bytes, "torn: {counts:?}");
            assert_eq!(counts.pending_begun_bytes, counts.pending_begun * size, "torn: {counts:?}");
            assert_eq!(counts.pending_ended_bytes, counts.pending_ended * size, "torn: {counts:?}");
        }
    }
    if !device.torn_gauges && device.gauges[DeviceGauge::Reserved as usize] != 0 {
        let first = device.gauges[0];
        assert!(
            device.gauges.iter().enumerate().all(|(n, &gauge)| gauge == first + n as u64),
            "torn: {device:?}"
        );
    }
    if deep {
        let blocks = reader.blocks();
        torn.blocks = blocks.torn;
        for (entry, _) in blocks.entries {
            assert_eq!(entry, block(entry.address, usize::from(entry.lifetime)), "torn");
        }
        for event in reader.events(cursor).entries {
            let from_address = (event.address ^ 0xff, event.address.wrapping_mul(3));
            assert_eq!((event.size, event.time), from_address, "torn: {event:?}");
            assert_eq!(event.stream, (event.address >> 9) as u32 ^ 0x5555, "torn: {event:?}");
        }
    }
    torn
}

fn ten_thousand_snapshots() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Role::start("write", folder.path());
    let reader = Reader::open(Path::new(&writer.line())).unwrap();
    assert_eq!(reader.is_live(), Some(true));
    let (mut cursor, mut sum) = (Cursor::default(), Torn::default());
    let before = reader.device(0).unwrap().total().mallocs;
    let begin = Instant::now();
    let written = || reader.device(0).unwrap().total().mallocs - before;
    // Ten thousand, and more where the writer has written little in the time that they took.
    let is_enough = |looks: u32| looks >= 10_000 && (looks >= 100_000 || written() > 100_000);
    for n in (0..).take_while(|&looks| !is_enough(looks)) {
        let torn = check(&reader, &mut cursor, n % 25 == 0);
        sum.shards += torn.shards;
        sum.gauges += torn.gauges;
        sum.blocks += torn.blocks;
    }
    let written = written();
    println!("  {:?}, {written} mallocs meanwhile, given up as torn: {sum:?}", begin.elapsed());
    assert!(written > 100_000, "the writer did write: {written}");
    assert!(sum.shards < 100 && sum.gauges < 100, "a busy writer lets readers in: {sum:?}");
}

fn killed_writers() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let mut writer = Role::start("write", folder.path());
        let path = PathBuf::from(writer.line());
        // On a busy machine it may take a while to begin.
        let living = Reader::open(&path).unwrap();
        while living.device(0).unwrap().total().mallocs == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(5 + round * 3));
        writer.kill();
        let reader = Reader::open(&path).unwrap();
        assert_eq!(reader.is_live(), Some(false), "the kernel dropped the lock");
        check(&reader, &mut Cursor::default(), true);
        let device = reader.device(0).unwrap();
        assert!(device.total().mallocs > 0 && device.live <= device.live_peak);
        assert!(!reader.health().closed);
        let state = read(folder.path(), Owners::Mine, |_| true)
            .unwrap()
            .found
            .into_iter()
            .find(|found| found.path == path)
            .map(|found| found.state);
        assert_eq!(state, Some(State::Stale));
    }
    let writer = Role::start("write", folder.path());
    let mut writer = writer;
    let live = PathBuf::from(writer.line());
    assert_eq!(sweep(folder.path(), Owners::Mine).removed, 20);
    assert!(live.exists(), "the living one stays");
}

fn forked_children() {
    let folder = tempfile::tempdir().unwrap();
    let mut parent = Role::start("fork", folder.path());
    let lines = [parent.line(), parent.line()];
    let child =
        lines.iter().find_map(|line| line.strip_prefix("child ")).expect("the child's line");
    let path = lines.iter().find(|line| !line.starts_with("child ")).expect("the parent's line");
    let child: i32 = child.parse().unwrap();
    let path = Path::new(path);
    let reader = Reader::open(path).expect("the child's close unlinked nothing");
    assert_eq!(reader.is_live(), Some(true));
    assert_eq!(reader.device(0).unwrap().total().mallocs, 1, "the child's call went nowhere");
    parent.kill();
    // SAFETY: asks whether the process exists.
    assert_eq!(unsafe { libc::kill(child, 0) }, 0, "the child still sleeps");
    let dead = Reader::open(path).unwrap().is_live();
    // SAFETY: the pid of the role's own child, alive a moment ago and nobody's but ours.
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!(dead, Some(false), "a sleeping child does not keep the dead alive");
}

fn two_namespaces() {
    let folder = tempfile::tempdir().unwrap();
    let mut roles: Vec<Role> = (0..2).map(|_| Role::start("namespace", folder.path())).collect();
    let lines: Vec<String> = roles.iter_mut().map(Role::line).collect();
    if let Some(line) = lines.iter().find(|line| line.starts_with("skipped")) {
        return skip::refused(&format!("no pid namespace can be made: {line}"));
    }
    let found = read(folder.path(), Owners::Mine, |_| true).unwrap().found;
    assert_eq!(found.len(), 2);
    let facts: Vec<_> =
        found.iter().map(|found| found.reader.as_ref().expect("readable").process()).collect();
    assert_eq!((facts[0].pid, facts[1].pid), (1, 1), "both are process 1 of their namespace");
    assert_ne!(facts[0].pid_namespace, facts[1].pid_namespace);
    assert!(found.iter().all(|found| found.state == State::Live));
    assert_eq!(
        sweep(folder.path(), Owners::Mine).removed,
        0,
        "pids of another namespace mean nothing to a sweep"
    );
}

fn survived(role: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Role::start(role, folder.path());
    let line = child.line();
    let status = child.child.wait().unwrap();
    assert!(status.success(), "{role}: {status}, {line:?}");
    if line.starts_with("skipped") {
        skip::refused(&format!("{role}: {line}"));
        return None;
    }
    Some(line)
}

fn full_tmpfs() {
    if let Some(line) = survived("tiny") {
        let made = line.strip_prefix("survived ").expect("its word");
        assert!(
            made.starts_with('f') && made.ends_with('m'),
            "files while there is room, then memory: {made}"
        );
    }
}

fn nothing_is_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let mut writers: Vec<Role> = (0..2).map(|_| Role::start("write", folder.path())).collect();
    let paths: Vec<PathBuf> =
        writers.iter_mut().map(|writer| PathBuf::from(writer.line())).collect();
    writers[0].kill();
    let mut child = Role::start("beside", folder.path());
    assert_eq!(child.line(), "survived");
    assert!(child.child.wait().unwrap().success());
    assert!(!paths[0].exists() && paths[1].exists());
}

fn file_size_limit() {
    assert_eq!(survived("limit").as_deref(), Some("survived"));
}
