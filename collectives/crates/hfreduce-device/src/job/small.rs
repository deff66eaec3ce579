//! Small copies, which the processor makes in one step as soon as the caller's stream has made the memory
//! ready.

use super::*;

impl Job {
    /// True while the processor shall make this copy.
    pub(super) fn is_processors(&self, lane: &Lane, down: bool) -> bool {
        let (cursor, range) = match down {
            true => (&self.down, self.memory.input),
            false => (&self.up, self.memory.output),
        };
        let started = cursor.is_issued() || self.engine_copies[usize::from(down)];
        !started && lane.windows.suits(down, range.bytes)
    }

    /// Makes a small copy once all of its bytes may be copied; true if it did.
    pub(super) fn copy_at_once(
        &mut self,
        lane: &mut Lane,
        down: bool,
        offset: usize,
    ) -> Result<bool, DeviceError> {
        let Some(block) = self.block.as_ref().filter(|_| self.is_processors(lane, down)) else {
            return Ok(false);
        };
        let range = if down { self.memory.input } else { self.memory.output };
        if offset < range.bytes || self.settled.is_ended() {
            return Ok(false);
        }
        self.asks_stream = !self.ready.has_passed()?;
        if self.asks_stream {
            return Ok(false);
        }
        let (windows, cuda) = (&mut lane.windows, &lane.context.cuda);
        // SAFETY: block and memory stay until this job is drained, as for the copy engine; the stream has made
        // the memory ready; output is not written after its delivery.
        let copied = unsafe {
            match down {
                true => windows.read(cuda, block.at(0), range.pointer, range.bytes),
                false => windows.write(cuda, range.pointer, block.at(self.output_at), range.bytes),
            }
        };
        self.engine_copies[usize::from(down)] = !copied;
        if !copied {
            return Ok(false);
        }
        let counter = if down { &lane.counters.down_bytes } else { &lane.counters.up_bytes };
        for counter in [counter, &lane.counters.by_processor_bytes] {
            counter.fetch_add(range.bytes as u64, Ordering::Relaxed);
        }
        let cursor = if down { &mut self.down } else { &mut self.up };
        cursor.issued(&(0..range.bytes));
        cursor.landed(range.bytes);
        if let (true, Some(pace), Some(work)) = (down, &self.pace, self.work.get()) {
            work.arrived(pace, range.bytes);
        }
        Ok(true)
    }
}
