//! Tests of the screen for processes that have ended.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use gruyere_record::sites::NewSite;
use gruyere_record::watch::Forecast;
use gruyere_record::{
    BlockEntry, DeviceFacts, DeviceGauge, EventKind, Record, RecordOptions, clock,
};
use insta::assert_binary_snapshot;
use ratatui::crossterm::event::KeyCode;

use super::app::{App, Row, View};
use super::columns::Sort;
use super::picture::{DARK, LIGHT};
use super::sick;
use super::tests::{GIB, SIZES, app, buffer, press, row, shown};
use super::theme::Theme;
use crate::ending::Ending;
use crate::follow::{Follower, Life, Which};
use crate::target::Folder;

/// Rank 1 of four, which grew and ran out of memory.
fn ran_out() -> App {
    let mut app = app(Theme::new(false));
    let row = app.rows.iter_mut().find(|row| row.process.pid == 4201).expect("a rank");
    (row.life, row.forecast) = (Life::Ended, Forecast::Unknown);
    row.ending = Some(Ending {
        since: SystemTime::now() - Duration::from_secs(200),
        ran_out: true,
        says: "metrics.py:12 in Meter.keep keeps 96 MiB a step since step 1010: 1 GiB of the 33 \
               GiB live (3%)"
            .to_owned(),
        remedy: Some("To do: find what keeps that line's result and bound it.".to_owned()),
        record: Some(PathBuf::from("/dev/shm/gruyere-1-4201-3-1.record")),
        page: None,
    });
    app.rows.iter_mut().for_each(|row| row.forecast = Forecast::NoGrowth);
    app.arrange();
    app.raise_alarm(None);
    app
}

#[test]
fn pictures_of_one_that_ran_out_are_kept() {
    for size in SIZES {
        for palette in [LIGHT, DARK] {
            let picture = palette.svg(&buffer(&mut ran_out(), size));
            let name = format!("ended-{}x{}-{}.svg", size.0, size.1, palette.name);
            assert_binary_snapshot!(name.as_str(), picture.into_bytes());
        }
    }
}

#[test]
fn one_that_ran_out_is_chosen_and_the_lines_above_all_say_what_to_do_and_where_to_look() {
    for (width, height) in SIZES {
        let mut app = ran_out();
        assert_eq!((app.chosen().map(|row| row.process.pid), app.chosen_at()), (Some(4201), 0));
        let screen = shown(&mut app, width, height);
        let above: Vec<&str> = screen.lines().skip(1).take_while(|l| !l.contains("PID")).collect();
        let above = above.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
        assert_eq!(
            above,
            "rank 1 ran out of memory 3 min ago: metrics.py:12 in Meter.keep keeps 96 MiB a step \
             since step 1010: 1 GiB of the 33 GiB live (3%) To do: find what keeps that line's \
             result and bound it. More: gruyere post 4201; gruyere post 4201 --html: a page"
        );
        assert!(screen.contains(" ran out ") && screen.contains("the end"), "{screen}");
        app.view = View::Detail;
        assert!(shown(&mut app, width, height).contains("More: gruyere post 4201"));
    }
    // The screen names the page that the program left.
    let mut app = ran_out();
    let ending = app.rows[0].ending.as_mut().expect("it ended");
    ending.page = Some(PathBuf::from("/dumps/gruyere-oom-4201-gpu1-1-x.html"));
    app.raise_alarm(None);
    let last = app.next.last().expect("a line");
    assert_eq!(last, "More: gruyere post 4201; the page: /dumps/gruyere-oom-4201-gpu1-1-x.html");
    // One that has started since has the screen.
    let mut app = ran_out();
    let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    let mut next = row(6, Life::Live, Forecast::NoGrowth);
    next.process.created = u64::try_from(started.as_nanos()).expect("before 2554");
    app.rows.push(next);
    app.arrange();
    app.raise_alarm(None);
    assert!(app.alarm.is_none() && app.chosen().is_some_and(|row| row.ending.is_none()));
    // A forecast of out of memory is more urgent than a past one.
    let mut app = ran_out();
    app.rows.push(row(5, Life::Live, super::tests::growing(400.0)));
    app.arrange();
    app.raise_alarm(None);
    assert!(app.alarm.as_ref().is_some_and(|said| said.starts_with("rank 5 runs out in 7 min")));
    assert!(app.next.is_empty());
}

#[test]
fn an_empty_screen_says_where_those_that_died_are() {
    let mut app = App::new(Sort::Sick, Duration::from_millis(500), Theme::new(false));
    app.old = 2;
    let screen = shown(&mut app, 80, 12);
    assert!(screen.contains("2 died and left a record: `gruyere post` shows the last"), "{screen}");
}

const BLOCKS: u64 = 10;

/// The record of this process, in which a line keeps `BLOCKS` blocks of a GiB.
fn record(folder: &Path) -> (&'static Record, impl FnOnce()) {
    let options = RecordOptions {
        directory: folder.to_owned(),
        ring_events: 256,
        max_blocks: 256,
        ..RecordOptions::default()
    };
    let facts = DeviceFacts { name: "Phantom".to_owned(), uuid: [1; 16], total_memory: 16 << 30 };
    let record: &'static Record = Box::leak(Box::new(Record::create(&options, &[facts])));
    let frame = record.frame("/home/me/train.py", "step", 28);
    let site = record.site(&NewSite { frames: &[frame], ..NewSite::default() });
    let mut shard = record.shard(0, 0);
    let mut slots = Vec::new();
    for n in 1..=BLOCKS {
        let (address, size, requested) = (n << 30, GIB, GIB);
        let entry = BlockEntry { address, size, requested, site, ..BlockEntry::default() };
        let slot = shard.block_insert(&entry);
        shard.set_site(slot, site);
        slots.push(slot);
    }
    let gauges = [(DeviceGauge::Limit, 16 * GIB), (DeviceGauge::Reserved, BLOCKS * GIB)];
    record.device(0).set(&gauges);
    record.device(0).sample(BLOCKS * GIB);
    let free_nearly_all = move || {
        for slot in slots.into_iter().skip(1) {
            shard.block_remove(slot, GIB, GIB, 0, false);
        }
    };
    (record, free_nearly_all)
}

/// `top` on the records in `folder`.
fn following(folder: &Path) -> (Follower, App) {
    let which = Folder { directory: folder.to_owned(), all_users: false };
    let follower = Follower::new(Which::All(which)).expect("a folder");
    (follower, App::new(Sort::Sick, Duration::from_millis(500), Theme::new(false)))
}

/// Text that `top` shows for the record in `folder`.
fn look(follower: &mut Follower, app: &mut App) -> String {
    follower.look(Instant::now());
    app.update(follower, Instant::now());
    shown(app, 80, 24)
}

/// The share displayed for the line of [`record`].
fn share(screen: &str) -> u64 {
    let line = screen.lines().find(|line| line.contains("train.py:28")).expect("the line");
    let share = line.split_whitespace().find_map(|word| word.strip_suffix('%'));
    share.and_then(|share| share.parse().ok()).expect("a share")
}

#[test]
fn one_that_ended_by_an_out_of_memory_stays_as_it_was_then() {
    let folder = tempfile::tempdir().expect("a folder");
    let (record, free_nearly_all) = record(folder.path());
    let (mut follower, mut app) = following(folder.path());
    assert_eq!(share(&look(&mut follower, &mut app)), 100);
    record.event(EventKind::OutOfMemory, 0, 0, 0, 0, 8 * GIB, clock::now());
    record.device(0).add(DeviceGauge::OutOfMemories, 1);
    let copy = record.leave_copy().expect("a file");
    free_nearly_all();
    look(&mut follower, &mut app);
    record.close();
    let ended = look(&mut follower, &mut app);
    assert_eq!((share(&ended), app.rows[0].snapshot.live), (100, BLOCKS * GIB));
    let pid = std::process::id();
    assert!(ended.contains("ran out of memory") && ended.contains(&format!("gruyere post {pid}")));
    // The row stays until the record is swept or the user drops it.
    assert_eq!(look(&mut follower, &mut app), ended);
    assert_eq!(follower.old(), 0);
    press(&mut app, KeyCode::Char('x'));
    follower.forget_dead();
    assert_eq!((follower.followed().len(), follower.old()), (0, 1));
    std::fs::remove_file(copy).expect("removed");
}

#[test]
fn one_that_shuts_down_after_an_out_of_memory_has_run_out_until_it_goes_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let (record, free_nearly_all) = record(folder.path());
    let (mut follower, mut app) = following(folder.path());
    look(&mut follower, &mut app);
    // A refusal that the program may catch.
    record.event(EventKind::OutOfMemory, 0, 0, 0, 0, 8 * GIB, clock::now());
    record.device(0).add(DeviceGauge::OutOfMemories, 1);
    record.keep_moment().expect("room");
    assert!(!look(&mut follower, &mut app).contains("ran out"));
    // Nothing caught it: the end of the program begins with the copy, then the heap empties.
    record.leave_copy().expect("a file");
    free_nearly_all();
    let ending = look(&mut follower, &mut app);
    assert_eq!((share(&ending), app.rows[0].snapshot.live), (100, BLOCKS * GIB));
    assert!(ending.contains("ran out of memory") && ending.contains("1 process "), "{ending}");
    assert!(!ending.contains("stale"), "{ending}");
    assert_eq!(look(&mut follower, &mut app), ending);
    // At an interpreter's prompt, a program goes on: its next step is of its own.
    record.device(0).set(&[(DeviceGauge::Step, 1)]);
    let runs = look(&mut follower, &mut app);
    assert_eq!(app.rows[0].snapshot.live, GIB);
    assert!(!runs.contains("ran out"), "{runs}");
}

#[test]
fn one_that_left_no_record_stays_as_it_was_seen_last() {
    let folder = tempfile::tempdir().expect("a folder");
    let (record, free_nearly_all) = record(folder.path());
    let (mut follower, mut app) = following(folder.path());
    look(&mut follower, &mut app);
    record.device(0).add(DeviceGauge::OutOfMemories, 1);
    free_nearly_all();
    record.close();
    let ended = look(&mut follower, &mut app);
    assert_eq!((share(&ended), app.rows[0].snapshot.live), (100, BLOCKS * GIB));
    assert!(ended.contains("It left no record; dump_dir:FOLDER"), "{ended}");
}

#[test]
fn of_a_jobs_ranks_the_one_that_ran_out_of_memory_is_told_though_the_others_died_later() {
    let dead = |rank, seconds, ran_out| {
        let since = SystemTime::now() - Duration::from_secs(seconds);
        let ending = Ending {
            since,
            ran_out,
            says: "Nothing grows".to_owned(),
            remedy: None,
            record: None,
            page: None,
        };
        let killed = row(rank, Life::Killed, Forecast::Unknown);
        Row { ending: Some(ending), ..killed }
    };
    let told = |rows: &[Row]| sick::last_dead(rows).and_then(|row| row.process.rank);
    let job = [dead(0, 2, false), dead(1, 8, true), dead(2, 7, true), dead(3, 2, false)];
    assert_eq!(told(&job), Some(1));
    assert_eq!(told(&job[..1]), Some(0));
    // Of another job's out-of-memory, nobody died.
    let mut other = dead(5, 30, true);
    other.process.job = "another".to_owned();
    assert_eq!(told(&[dead(0, 2, false), other]), Some(0));
}
