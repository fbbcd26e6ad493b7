//! The reader accepts exactly the format; its errors name the place and a remedy.

use gruyere_replay::trace::{Damage, Op, Trace, TraceError};
use proptest::prelude::*;
use std::io::Write;
use std::path::{Path, PathBuf};

fn read(text: &str) -> Result<Trace, TraceError> {
    Trace::read("test", text.as_bytes())
}

fn refused(text: &str) -> (u64, Damage) {
    let error = read(text).expect_err(text);
    let message = error.to_string();
    assert!(message.contains(error.damage().remedy()), "{message}");
    if error.line() > 0 {
        assert!(message.contains(&format!("line {}:", error.line())), "{message}");
    }
    (error.line(), error.damage().clone())
}

fn bundled() -> Vec<PathBuf> {
    traces_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces"))
}

fn traces_in(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().ends_with(".trace.zst"))
        .collect();
    found.sort();
    found
}

#[test]
fn every_verb_is_read() {
    let trace = read(
        "a 7 1000 0 0\na 9 0 1 42\nr 7 42\nk 0 3\ne 5 42\nw 0 5\nh e 5\nh s 42\nh d\nm step\nm \
         epoch 1 ends\nf 7\nf 9\n",
    )
    .unwrap();
    assert_eq!(
        trace.ops,
        [
            Op::Alloc { size: 1000, block: 0, stream: 0, device: 0 },
            Op::Alloc { size: 0, block: 1, stream: 1, device: 1 },
            Op::RecordStream { block: 0, stream: 1 },
            Op::Kernels { count: 3, stream: 0 },
            Op::EventRecord { event: 0, stream: 1 },
            Op::StreamWait { event: 0, stream: 0 },
            Op::HostWaitEvent { event: 0 },
            Op::HostWaitStream { stream: 1 },
            Op::HostWaitDevice,
            Op::Step,
            Op::Mark { mark: 0 },
            Op::Free { block: 0 },
            Op::Free { block: 1 },
        ]
    );
    assert_eq!(trace.streams, [0, 42]);
    assert_eq!(trace.marks, ["epoch 1 ends"]);
    assert_eq!((&trace.ids[..], trace.events, trace.devices), (&[7, 9][..], 1, 2));
    assert_eq!((trace.operations, trace.peak_live), (4, 1024));
}

#[test]
fn each_damage_is_named_with_its_line() {
    let field = |name| Damage::MissingField(name);
    let cases = [
        ("a 1 512 0 0\nb 2\n", 2, Damage::UnknownVerb("b".into())),
        ("a 1 512 0 0\nA 2 512 0 0\n", 2, Damage::UnknownVerb("A".into())),
        ("a 1 512 0\n", 1, field("STREAM")),
        ("a 1 512\n", 1, field("DEVICE")),
        ("a 1\n", 1, field("SIZE")),
        ("a\n", 1, field("ID")),
        ("k 0\n", 1, field("N")),
        ("e 1\n", 1, field("STREAM")),
        ("w 0\n", 1, field("EVENT")),
        ("h\n", 1, field("what the host waits for")),
        ("h e\n", 1, field("EVENT")),
        ("h s\n", 1, field("STREAM")),
        ("m\n", 1, field("TEXT")),
        ("m \n", 1, field("TEXT")),
        ("h d 1\n", 1, Damage::ExtraField("1".into())),
        ("a 1 512 0 0 0\n", 1, Damage::ExtraField("0".into())),
        ("h x\n", 1, Damage::UnknownHostWait("x".into())),
        ("a 1 5x 0 0\n", 1, Damage::BadNumber("SIZE", "5x".into(), 1 << 50)),
        ("a 1 -5 0 0\n", 1, Damage::BadNumber("SIZE", "-5".into(), 1 << 50)),
        ("a +1 5 0 0\n", 1, Damage::BadNumber("ID", "+1".into(), u64::MAX)),
        ("a 1 5 64 0\n", 1, Damage::BadNumber("DEVICE", "64".into(), 63)),
        (
            "a 1 1125899906842625 0 0\n",
            1,
            Damage::BadNumber("SIZE", "1125899906842625".into(), 1 << 50),
        ),
        (
            "f 18446744073709551616\n",
            1,
            Damage::BadNumber("ID", "18446744073709551616".into(), u64::MAX),
        ),
        ("k 0 4294967296\n", 1, Damage::BadNumber("N", "4294967296".into(), u32::MAX.into())),
        ("a 1 5 0 0\na 1 5 0 0\n", 2, Damage::IdReused(1)),
        ("a 1 5 0 0\nf 1\na 1 5 0 0\n", 3, Damage::IdReused(1)),
        ("f 1\n", 1, Damage::UnknownId(1)),
        ("a 1 5 0 0\nf 1\nm step\nf 1\n", 4, Damage::DeadId(1, 2)),
        ("r 1 0\n", 1, Damage::UnknownId(1)),
        ("a 1 5 0 0\nf 1\nr 1 0\n", 3, Damage::DeadId(1, 2)),
        ("w 0 3\n", 1, Damage::UnknownEvent(3)),
        ("e 3 0\nh e 4\n", 2, Damage::UnknownEvent(4)),
        ("k 0 1\n\nk 0 1\n", 2, Damage::Blank),
        ("k 0 1\nk 0", 2, Damage::CutShort),
        ("", 0, Damage::Empty),
    ];
    for (text, line, damage) in cases {
        assert_eq!(refused(text), (line, damage), "{text:?}");
    }
    let long = format!("m {}\n", "x".repeat(5000));
    assert_eq!(refused(&long), (1, Damage::LineTooLong));
    assert_eq!(
        Trace::read("t", &b"k 0 1\nm \xff\xfe\n"[..]).unwrap_err().damage(),
        &Damage::NotText
    );
}

#[test]
fn a_missing_file_is_named() {
    let error = Trace::open(Path::new("no/such.trace.zst")).unwrap_err();
    assert!(matches!(error.damage(), Damage::Unreadable(_)));
    assert!(error.to_string().starts_with("no/such.trace.zst: "), "{error}");
}

#[test]
fn compressed_and_plain_read_alike() {
    let text = "a 1 512 0 0\nk 0 1\nf 1\n";
    let packed = zstd::encode_all(text.as_bytes(), 3).unwrap();
    assert_eq!(Trace::read("t", &packed[..]).unwrap(), Trace::read("t", text.as_bytes()).unwrap());
}

#[test]
fn a_cut_compressed_trace_is_refused_wherever_it_is_cut() {
    let mut packed = zstd::Encoder::new(Vec::new(), 1).unwrap();
    for id in 1..20_000 {
        writeln!(packed, "a {id} {} 0 0", id * 512 % 77_777).unwrap();
    }
    let packed = packed.finish().unwrap();
    assert!(Trace::read("t", &packed[..]).is_ok());
    for cut in (4..packed.len()).step_by(997).chain([packed.len() - 1]) {
        let error = Trace::read("t", &packed[..cut]).expect_err("cut");
        assert!(
            matches!(error.damage(), Damage::Compression(_)),
            "cut at {cut} of {}: {error}",
            packed.len()
        );
    }
}

#[test]
fn a_trace_in_pieces_ends_before_a_piece_that_is_cut() {
    let piece = |n: u64| {
        zstd::encode_all(format!("a {n} {} 0 0\nm step\nf {n}\n", n * 1000).as_bytes(), 3).unwrap()
    };
    let (first, second, third) = (piece(1), piece(2), piece(3));
    let whole = [first.clone(), second.clone(), third.clone()].concat();
    let all = Trace::read("whole", &whole[..]).unwrap();
    assert_eq!((all.operations, all.marks.len()), (6, 0));
    for length in 0..=whole.len() {
        let read = Trace::read("cut", &whole[..length]);
        let pieces = [first.len(), first.len() + second.len(), whole.len()];
        match pieces.iter().position(|&end| end == length) {
            Some(count) => {
                let trace = read.unwrap();
                assert_eq!((trace.operations, trace.marks.len()), (2 * (count as u64 + 1), 0));
            }
            None if length > first.len() => {
                let trace = read.unwrap_or_else(|error| panic!("{length}: {error}"));
                assert!(trace.operations >= 2 && trace.marks[0].contains("cut short"), "{length}");
            }
            None => assert!(read.is_err(), "{length}: a single piece that is cut is damage"),
        }
    }
}

#[test]
fn bundled_traces_are_read_whole() {
    let traces: Vec<_> = bundled().iter().map(|path| Trace::open(path).unwrap()).collect();
    assert_eq!(traces.len(), 7);
    let gib = |t: &Trace| (t.peak_live as f64 / (1u64 << 30) as f64 * 10.0).round() / 10.0;
    let peaks: Vec<_> = traces.iter().map(|t| (t.name.as_str(), gib(t))).collect();
    // traces/FORMAT.md
    assert_eq!(
        peaks,
        [
            ("fsdp", 12.6),
            ("generate", 20.0),
            ("gpt2xl_accum", 22.1),
            ("llama7b_full", 62.8),
            ("llama7b_lora", 32.2),
            ("moe", 14.0),
            ("offload", 11.4)
        ]
    );
}

/// One line of a valid trace, from arbitrary numbers; keeps the books needed for validity.
fn valid_line(books: &mut (Vec<u64>, u64, Vec<u64>), pick: u8, a: u64, b: u64) -> String {
    let (live, next, events) = books;
    let chosen = |from: &[u64]| from[(a % from.len() as u64) as usize];
    match pick % 9 {
        0..=2 => {
            *next += 1 + b % 3;
            live.push(*next);
            format!("a {next} {} {} {}\n", a % (1 << 50), b % 4, b % 7)
        }
        3 if !live.is_empty() => {
            format!("f {}\n", live.swap_remove((a % live.len() as u64) as usize))
        }
        4 if !live.is_empty() => format!("r {} {}\n", chosen(live), b % 7),
        5 => {
            events.push(a);
            format!("e {a} {}\n", b % 7)
        }
        6 if !events.is_empty() => format!("w {} {}\n", b % 7, chosen(events)),
        7 if !events.is_empty() => format!("h e {}\n", chosen(events)),
        8 => "h d\n".to_owned(),
        _ => format!("k {} {}\n", b % 7, a % 1000),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Trace::read("fuzz", &bytes[..]);
        let mut magic = vec![0x28, 0xb5, 0x2f, 0xfd];
        magic.extend(&bytes);
        prop_assert!(Trace::read("fuzz", &magic[..]).is_err());
    }

    #[test]
    fn lines_of_the_right_words_never_panic(
        lines in prop::collection::vec(("[afrkewhm]", "( [esd0-9]{1,22}){0,5}"), 0..40)
    ) {
        let text: String = lines.iter().map(|(verb, rest)| format!("{verb}{rest}\n")).collect();
        if let Ok(trace) = read(&text) {
            prop_assert_eq!(trace.ops.len(), lines.len());
        }
    }

    #[test]
    fn valid_traces_are_taken_line_for_line(
        steps in prop::collection::vec(any::<(u8, u64, u64)>(), 1..200)
    ) {
        let mut books = (Vec::new(), 0, Vec::new());
        let text: String =
            steps.iter().map(|&(pick, a, b)| valid_line(&mut books, pick, a, b)).collect();
        let trace = read(&text).unwrap();
        prop_assert_eq!(trace.ops.len(), steps.len());
        let allocs = trace.ops.iter().filter(|op| matches!(op, Op::Alloc { .. })).count();
        prop_assert_eq!(trace.blocks(), allocs);
    }

    #[test]
    fn a_damaged_line_is_found_where_it_is(
        steps in prop::collection::vec(any::<(u8, u64, u64)>(), 1..100),
        at in any::<prop::sample::Index>(),
        junk in prop::sample::select(vec!["x", "a", "f 999999999999999999", "k 1 1 1", "h q", "e 1 \
            y", "", "w 0 123456789z"]),
    ) {
        let mut books = (Vec::new(), 0, Vec::new());
        let mut lines: Vec<String> =
            steps.iter().map(|&(pick, a, b)| valid_line(&mut books, pick, a, b)).collect();
        let at = at.index(lines.len());
        lines.insert(at, format!("{junk}\n"));
        prop_assert_eq!(refused(&lines.concat()).0, at as u64 + 1);
    }

    #[test]
    fn a_flipped_bit_in_a_compressed_trace_never_panics(
        at in any::<prop::sample::Index>(), bit in 0..8u8
    ) {
        let text: String = (1..500).map(|id| format!("a {id} {} 0 0\n", id * 37)).collect();
        let mut packed = zstd::encode_all(text.as_bytes(), 3).unwrap();
        let at = at.index(packed.len());
        packed[at] ^= 1 << bit;
        let _ = Trace::read("fuzz", &packed[..]);
    }
}
