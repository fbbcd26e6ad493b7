//! The reader: text, compressed or not, to checked operations.

use super::{Damage, Op, Trace, TraceError, rounded};
use std::cell::Cell;
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read};
use zstd::stream::read::Decoder;

/// Longest line accepted, bytes. Events take under 60; marks are free text.
pub(super) const LONGEST_LINE: usize = 4096;
/// Largest request accepted, bytes (1 PiB): no device is near it, and sums of live bytes cannot
/// overflow.
const LARGEST_SIZE: u64 = 1 << 50;
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// State of an identifier.
struct Known {
    block: u32,
    size: u64,
    /// Line of its free; 0 while it is live.
    freed_at: u64,
}

/// The text of compressed pieces (zstd frames), one after the other. A program that writes its own
/// trace appends pieces and may be killed during a write: a truncated last piece ends the text. If
/// the file has only one piece, truncation is damage, as in an incomplete download.
struct Pieces<'a, R: BufRead> {
    decoder: Option<Decoder<'static, R>>,
    first: bool,
    cut: &'a Cell<bool>,
}

impl<'a, R: BufRead> Pieces<'a, R> {
    fn new(input: R, cut: &'a Cell<bool>) -> io::Result<Self> {
        Ok(Self { decoder: Some(Decoder::with_buffer(input)?.single_frame()), first: true, cut })
    }
}

impl<R: BufRead> Read for Pieces<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            match decoder.read(buffer) {
                Ok(0) if !buffer.is_empty() => {
                    let Some(mut input) = self.decoder.take().map(Decoder::finish) else { break };
                    if !input.fill_buf()?.is_empty() {
                        self.first = false;
                        self.decoder = Some(Decoder::with_buffer(input)?.single_frame());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !self.first => {
                    self.cut.set(true);
                    self.decoder = None;
                }
                other => return other,
            }
        }
        Ok(0)
    }
}

struct Reader<'a> {
    trace: Trace,
    /// Set if the text ends with a truncated piece.
    cut: Option<&'a Cell<bool>>,
    ids: HashMap<u64, Known>,
    events: HashMap<u64, u32>,
    streams: HashMap<u64, u16>,
    live: u64,
    line: u64,
}

pub(super) fn read(name: &str, input: impl Read) -> Result<Trace, TraceError> {
    let mut input = BufReader::with_capacity(1 << 16, input);
    let compressed = input
        .fill_buf()
        .map_err(|e| TraceError::new(0, Damage::Unreadable(e.to_string())))?
        .starts_with(&ZSTD_MAGIC);
    let cut = Cell::new(false);
    let mut reader = Reader::new(name);
    if compressed {
        let pieces = Pieces::new(input, &cut)
            .map_err(|e| TraceError::new(0, Damage::Compression(e.to_string())))?;
        reader.cut = Some(&cut);
        reader.lines(BufReader::with_capacity(1 << 16, pieces), |e| {
            Damage::Compression(e.to_string())
        })?;
        if cut.get() {
            reader.mark(super::CUT).map_err(|damage| TraceError::new(reader.line, damage))?;
        }
    } else {
        reader.lines(input, |e| Damage::Unreadable(e.to_string()))?;
    }
    reader.finish()
}

impl Reader<'_> {
    fn new(name: &str) -> Self {
        let trace = Trace {
            name: name.to_owned(),
            ops: Vec::new(),
            streams: vec![0],
            marks: Vec::new(),
            ids: Vec::new(),
            events: 0,
            devices: 1,
            operations: 0,
            peak_live: 0,
        };
        Self {
            trace,
            cut: None,
            ids: HashMap::new(),
            events: HashMap::new(),
            streams: HashMap::from([(0, 0)]),
            live: 0,
            line: 0,
        }
    }

    fn lines(
        &mut self,
        mut input: impl BufRead,
        broken: impl Fn(io::Error) -> Damage,
    ) -> Result<(), TraceError> {
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = input.by_ref().take(LONGEST_LINE as u64 + 1).read_until(b'\n', &mut line);
            match read {
                Ok(0) => return Ok(()),
                Ok(_) => self.line += 1,
                Err(error) => return Err(TraceError::new(self.line, broken(error))),
            }
            let damage = match line.strip_suffix(b"\n") {
                None if line.len() > LONGEST_LINE => Err(Damage::LineTooLong),
                None if self.cut.is_some_and(Cell::get) => return Ok(()),
                None => Err(Damage::CutShort),
                Some(text) => std::str::from_utf8(text)
                    .map_err(|_| Damage::NotText)
                    .and_then(|t| self.event(t)),
            };
            damage.map_err(|damage| TraceError::new(self.line, damage))?;
        }
    }

    fn event(&mut self, line: &str) -> Result<(), Damage> {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if let Some(text) = line.strip_prefix("m ") {
            return self.mark(text);
        }
        let mut fields = Fields { rest: line.split_ascii_whitespace() };
        let op = match fields.verb()? {
            "a" => self.alloc(&mut fields)?,
            "f" => self.free(&mut fields)?,
            "r" => {
                let block = self.live(fields.number("ID", u64::MAX)?)?.block;
                Op::RecordStream { block, stream: self.stream(&mut fields)? }
            }
            "k" => {
                let stream = self.stream(&mut fields)?;
                Op::Kernels { count: fields.number("N", u32::MAX.into())? as u32, stream }
            }
            "e" => {
                let event = fields.number("EVENT", u64::MAX)?;
                let stream = self.stream(&mut fields)?;
                Op::EventRecord { event: self.event_recorded(event)?, stream }
            }
            "w" => {
                let stream = self.stream(&mut fields)?;
                Op::StreamWait { event: self.known_event(&mut fields)?, stream }
            }
            "h" => match fields.text("what the host waits for")? {
                "e" => Op::HostWaitEvent { event: self.known_event(&mut fields)? },
                "s" => Op::HostWaitStream { stream: self.stream(&mut fields)? },
                "d" => Op::HostWaitDevice,
                other => return Err(Damage::UnknownHostWait(other.to_owned())),
            },
            "m" => return Err(Damage::MissingField("TEXT")),
            other => return Err(Damage::UnknownVerb(other.chars().take(20).collect())),
        };
        fields.end()?;
        self.trace.ops.push(op);
        Ok(())
    }

    fn alloc(&mut self, fields: &mut Fields<'_>) -> Result<Op, Damage> {
        let id = fields.number("ID", u64::MAX)?;
        let size = fields.number("SIZE", LARGEST_SIZE)?;
        let device = fields.number("DEVICE", 63)? as u8;
        let stream = self.stream(fields)?;
        let block = u32::try_from(self.trace.ids.len())
            .map_err(|_| Damage::TooMany("allocations", u64::from(u32::MAX) + 1))?;
        if self.ids.contains_key(&id) {
            return Err(Damage::IdReused(id));
        }
        self.trace.ids.push(id);
        self.ids.insert(id, Known { block, size, freed_at: 0 });
        self.trace.devices = self.trace.devices.max(device + 1);
        self.trace.operations += 1;
        // At most 2^32 blocks of 2^50 bytes: only an artificial trace gets near the end of u64.
        self.live =
            self.live.checked_add(rounded(size)).ok_or(Damage::TooMany("live bytes", u64::MAX))?;
        self.trace.peak_live = self.trace.peak_live.max(self.live);
        Ok(Op::Alloc { size, block, stream, device })
    }

    fn free(&mut self, fields: &mut Fields<'_>) -> Result<Op, Damage> {
        let line = self.line;
        let known = self.live(fields.number("ID", u64::MAX)?)?;
        known.freed_at = line;
        let (block, size) = (known.block, known.size);
        self.live -= rounded(size);
        self.trace.operations += 1;
        Ok(Op::Free { block })
    }

    fn live(&mut self, id: u64) -> Result<&mut Known, Damage> {
        match self.ids.get_mut(&id) {
            None => Err(Damage::UnknownId(id)),
            Some(known) if known.freed_at > 0 => Err(Damage::DeadId(id, known.freed_at)),
            Some(known) => Ok(known),
        }
    }

    fn stream(&mut self, fields: &mut Fields<'_>) -> Result<u16, Damage> {
        let number = fields.number("STREAM", u64::MAX)?;
        if let Some(&stream) = self.streams.get(&number) {
            return Ok(stream);
        }
        let stream = u16::try_from(self.trace.streams.len())
            .map_err(|_| Damage::TooMany("streams", u64::from(u16::MAX) + 1))?;
        self.trace.streams.push(number);
        self.streams.insert(number, stream);
        Ok(stream)
    }

    fn event_recorded(&mut self, number: u64) -> Result<u32, Damage> {
        let next = self.trace.events;
        let event = *self.events.entry(number).or_insert(next);
        if event == next {
            self.trace.events =
                next.checked_add(1).ok_or(Damage::TooMany("events", u32::MAX.into()))?;
        }
        Ok(event)
    }

    fn known_event(&mut self, fields: &mut Fields<'_>) -> Result<u32, Damage> {
        let number = fields.number("EVENT", u64::MAX)?;
        self.events.get(&number).copied().ok_or(Damage::UnknownEvent(number))
    }

    fn mark(&mut self, text: &str) -> Result<(), Damage> {
        let text = text.trim();
        match text {
            "" => return Err(Damage::MissingField("TEXT")),
            "step" => self.trace.ops.push(Op::Step),
            _ => {
                let mark = u32::try_from(self.trace.marks.len())
                    .map_err(|_| Damage::TooMany("marks", u32::MAX.into()))?;
                self.trace.marks.push(text.to_owned());
                self.trace.ops.push(Op::Mark { mark });
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Trace, TraceError> {
        if self.trace.ops.is_empty() {
            return Err(TraceError::new(0, Damage::Empty));
        }
        self.trace.ops.shrink_to_fit();
        Ok(self.trace)
    }
}

/// The fields of one line.
struct Fields<'a> {
    rest: std::str::SplitAsciiWhitespace<'a>,
}

impl<'a> Fields<'a> {
    fn verb(&mut self) -> Result<&'a str, Damage> {
        self.rest.next().ok_or(Damage::Blank)
    }

    fn text(&mut self, name: &'static str) -> Result<&'a str, Damage> {
        self.rest.next().ok_or(Damage::MissingField(name))
    }

    /// Digits only: `parse` alone accepts a leading plus.
    fn number(&mut self, name: &'static str, max: u64) -> Result<u64, Damage> {
        let text = self.text(name)?;
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        let value = if digits { text.parse::<u64>().ok() } else { None };
        value
            .filter(|&value| value <= max)
            .ok_or_else(|| Damage::BadNumber(name, text.chars().take(30).collect(), max))
    }

    fn end(&mut self) -> Result<(), Damage> {
        match self.rest.next() {
            None => Ok(()),
            Some(extra) => Err(Damage::ExtraField(extra.chars().take(30).collect())),
        }
    }
}
