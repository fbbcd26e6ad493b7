//! Work on a stream: kernels, copies, fills, host functions.

use crate::abi::{Answer, code};
use crate::context;
use crate::gpu::{Phantom, failed};
use crate::reads;
use gruyere_phantom::CaptureStatus;

impl Phantom {
    /// Launches one kernel on `stream`.
    pub fn launch(&self, stream: usize) -> Answer {
        self.launch_many(stream, 1)
    }

    /// Launches `count` kernels on `stream`.
    pub fn launch_many(&self, stream: usize, count: u64) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        self.sim.launch(device, stream, count, self.kernel).map_err(failed)
    }

    /// Launches one kernel of known duration on `stream`.
    pub fn launch_of_length(&self, stream: usize, nanoseconds: u64) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        self.sim.launch(device, stream, 1, nanoseconds).map_err(failed)
    }

    /// Launches one kernel on `stream` that reads and writes a range.
    pub fn touch(&self, stream: usize, address: u64, bytes: u64) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        self.sim.launch_touching(device, stream, self.kernel, &[(address, bytes)]).map_err(failed)
    }

    /// A host function in the order of `stream`: runs at once, or never while the stream captures.
    pub fn host_function(&self, stream: usize, function: impl FnOnce()) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        if self.sim.capture_status(device, stream).map_err(failed)? == CaptureStatus::None {
            function();
        }
        Ok(())
    }

    /// True if `device` may access every byte of the range: host memory, or backed device memory;
    /// if contents are kept, only with access set.
    fn accessible(&self, device: u32, address: u64, bytes: usize) -> bool {
        if !(self.window.0..self.window.1).contains(&address) {
            return address != 0;
        }
        self.sim.is_backed(address, bytes as u64)
            && (self.contents.is_none()
                || self
                    .sim
                    .backing(address, bytes as u64)
                    .iter()
                    .all(|piece| piece.access & (1 << device) != 0))
    }

    /// The host waits for `stream`.
    pub fn wait_for_stream(&self, stream: usize) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        self.sim.stream_synchronize(device, stream).map_err(failed)
    }

    /// [`Phantom::copy`], followed by a host wait.
    pub fn copy_and_wait(&self, to: u64, from: u64, bytes: usize, stream: usize) -> Answer {
        self.copy(to, from, bytes, stream)?;
        self.wait_for_stream(stream)
    }

    /// Copies between any two memories, in the order of `stream`; copies above the limit move no
    /// bytes.
    pub fn copy(&self, to: u64, from: u64, bytes: usize, stream: usize) -> Answer {
        self.copy_rows((to, bytes), (from, bytes), bytes, 1, stream)
    }

    /// Copies `rows` rows of `bytes` each; a place is an address and a pitch.
    pub fn copy_rows(
        &self,
        (to, to_pitch): (u64, usize),
        (from, from_pitch): (u64, usize),
        bytes: usize,
        rows: usize,
        stream: usize,
    ) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        let mut read = 0;
        for row in 0..rows {
            let (to, from) = (to + (row * to_pitch) as u64, from + (row * from_pitch) as u64);
            self.copy_row(device, to, from, bytes, stream)?;
            read += if self.is_read(to, from) { bytes } else { 0 };
        }
        if read > 0 && !self.captures(device, stream)? {
            reads::note(read as u64);
        }
        Ok(())
    }

    fn is_device(&self, address: u64) -> bool {
        (self.window.0..self.window.1).contains(&address)
    }

    /// Whether this is a copy from device to host memory.
    fn is_read(&self, to: u64, from: u64) -> bool {
        self.is_device(from) && !self.is_device(to)
    }

    fn captures(&self, device: u32, stream: usize) -> Result<bool, u32> {
        Ok(self.sim.capture_status(device, stream).map_err(failed)? != CaptureStatus::None)
    }

    fn copy_row(&self, device: u32, to: u64, from: u64, bytes: usize, stream: usize) -> Answer {
        if bytes == 0 {
            return Ok(());
        }
        if !self.accessible(device, to, bytes) || !self.accessible(device, from, bytes) {
            return Err(code::INVALID_VALUE);
        }
        let on_device = |&(address, _): &(u64, u64)| self.is_device(address);
        let ranges: Vec<_> =
            [(to, bytes as u64), (from, bytes as u64)].into_iter().filter(on_device).collect();
        self.sim.launch_copy(device, stream, &ranges).map_err(failed)?;
        if self.captures(device, stream)? {
            return Ok(());
        }
        let done = bytes <= self.copy_limit;
        if let Some(values) = &self.values {
            if self.is_read(to, from) {
                // SAFETY: as below, and the ranges are apart: one is the host's, one ours.
                let (into, device) = unsafe {
                    (
                        std::slice::from_raw_parts_mut(to as *mut u8, bytes),
                        std::slice::from_raw_parts(from as *const u8, bytes),
                    )
                };
                values.read(into, device, from, self.window.0);
                return Ok(());
            }
            match (self.is_device(to), self.is_device(from)) {
                (true, true) if done => values.moved(to, from, bytes as u64),
                (true, false) if done => values.written(to, bytes as u64),
                (true, _) => values.lost(to, bytes as u64),
                _ => {}
            }
        }
        if done {
            // SAFETY: device memory was checked to be backed, and its addresses are writable host
            // addresses; host memory is the caller's, valid by the C contract of the copy.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
        }
        Ok(())
    }

    /// Fills memory with a pattern of 1, 2 or 4 bytes, in the order of `stream`.
    pub fn fill(&self, address: u64, pattern: &[u8], count: usize, stream: usize) -> Answer {
        let device = context::stream_device(stream).unwrap_or_else(|_| context::runtime_device());
        let bytes = pattern.len().checked_mul(count).ok_or(code::INVALID_VALUE)?;
        if bytes == 0 {
            return Ok(());
        }
        if self.contents.is_some() && !self.accessible(device, address, bytes) {
            return Err(code::INVALID_VALUE);
        }
        let is_managed = self.host.is_managed(address as usize, bytes);
        if is_managed {
            self.sim.launch_copy(device, stream, &[]).map_err(failed)?;
        } else {
            self.sim.memset(device, address, bytes as u64, stream).map_err(failed)?;
        }
        if self.captures(device, stream)? {
            return Ok(());
        }
        let done = bytes <= self.copy_limit;
        match self.values.as_ref().filter(|_| !is_managed) {
            Some(values) if done => values.filled(address, bytes as u64),
            Some(values) => values.lost(address, bytes as u64),
            None => {}
        }
        if done {
            // SAFETY: the simulator has checked that the range is backed, so it lies in our window,
            // which is writable; or it lies in managed memory, which we have mapped.
            let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
            match *pattern {
                [value] => memory.fill(value),
                _ => memory
                    .chunks_exact_mut(pattern.len())
                    .for_each(|chunk| chunk.copy_from_slice(pattern)),
            }
        }
        Ok(())
    }
}
