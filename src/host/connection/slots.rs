//! The command slots of one connection: who is in flight, how far its data has come, which buffer is its own.
//!
//! A command identifier is `generation << 10 | slot`. The generation changes with every use of a slot, so an answer to a
//! command that is already finished is recognised instead of being taken for its successor's.
#![forbid(unsafe_code)]

use std::ops::{Deref, DerefMut};

use super::{Completion, Data, ProtocolError};
use crate::nvme::{Cqe, Status};

const SLOT_BITS: u32 = 10;
/// Generations run from 0 to 62: 63 would allow the identifier FFFFh, which the specification reserves (Base 3.3.3.1).
const GENERATIONS: u16 = 63;

pub(super) struct Slot<In, Out> {
    generation: u16,
    busy: bool,
    pub token: u64,
    pub data: Data<In, Out>,
    /// Bytes of the command's data, the buffer's length.
    pub len: u32,
    /// Bytes received so far (In); they arrive in order.
    pub received: u32,
    /// Bytes sent or asked for so far (Out); R2Ts ask in order.
    pub requested: u32,
    /// R2Ts whose last byte has not gone out yet.
    pub open_r2ts: u32,
    /// Payload pieces of this slot that wait in the transmit queue. While there are any, the buffer must stay.
    unsent: u32,
    /// The data digest of some C2HData was wrong: the command fails whatever the controller says.
    pub digest_error: bool,
    /// The completion, if it came while payload was still queued.
    done: Option<Cqe>,
}

impl<In, Out> Slot<In, Out> {
    /// The slot of a new command.
    fn taken(generation: u16, data: Data<In, Out>, token: u64, len: u32) -> Slot<In, Out> {
        Slot {
            generation,
            busy: true,
            token,
            data,
            len,
            received: 0,
            requested: 0,
            open_r2ts: 0,
            unsent: 0,
            digest_error: false,
            done: None,
        }
    }
}

pub(super) struct Slots<In, Out> {
    slots: Vec<Slot<In, Out>>,
    free: Vec<u16>,
}

impl<In: DerefMut<Target = [u8]>, Out: Deref<Target = [u8]>> Slots<In, Out> {
    pub fn new(depth: u16) -> Self {
        let slots = (0..depth).map(|_| Slot { busy: false, ..Slot::taken(0, Data::None, 0, 0) }).collect();
        Slots { slots, free: (0..depth).rev().collect() }
    }

    pub fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// The slot's index within a command identifier that this side made.
    pub fn index(cid: u16) -> u16 {
        cid & ((1 << SLOT_BITS) - 1)
    }

    /// A slot for a new command, or its buffer back when all are busy.
    pub fn take(&mut self, data: Data<In, Out>, token: u64, len: u32) -> Result<u16, Data<In, Out>> {
        let Some(index) = self.free.pop() else { return Err(data) };
        let slot = &mut self.slots[usize::from(index)];
        debug_assert!(!slot.busy && slot.unsent == 0);
        let generation = (slot.generation + 1) % GENERATIONS;
        *slot = Slot::taken(generation, data, token, len);
        Ok(generation << SLOT_BITS | index)
    }

    /// The command that the target means by `cid`, which stands at byte `at` of its PDU; an error if there is none.
    pub fn lookup(&mut self, cid: u16, at: u32) -> Result<(u16, &mut Slot<In, Out>), ProtocolError> {
        let index = Self::index(cid);
        match self.slots.get_mut(usize::from(index)) {
            Some(slot) if slot.busy && slot.done.is_none() && slot.generation == cid >> SLOT_BITS => {
                Ok((index, slot))
            }
            _ => Err(ProtocolError::UnknownCommand { cid, at }),
        }
    }

    pub fn slot(&mut self, index: u16) -> &mut Slot<In, Out> {
        &mut self.slots[usize::from(index)]
    }

    /// The data to send of a slot, empty if it sends none.
    pub fn out_bytes(&self, index: u16) -> &[u8] {
        match &self.slots[usize::from(index)].data {
            Data::Out(buf) => buf,
            _ => &[],
        }
    }

    /// The data to receive of a slot, empty if it receives none.
    pub fn in_bytes(&mut self, index: u16) -> &mut [u8] {
        match &mut self.slots[usize::from(index)].data {
            Data::In(buf) => buf,
            _ => &mut [],
        }
    }

    pub fn mark_requested(&mut self, cid: u16, bytes: u32) {
        self.slots[usize::from(Self::index(cid))].requested = bytes;
    }

    pub fn payload_queued(&mut self, index: u16) {
        self.slots[usize::from(index)].unsent += 1;
    }

    /// One payload piece has gone out; returns the completion that waited for it, if any.
    pub fn payload_sent(&mut self, index: u16, ends_r2t: bool) -> Option<Completion<In, Out>> {
        let slot = self.slot(index);
        slot.unsent -= 1;
        if ends_r2t {
            slot.open_r2ts -= 1;
        }
        if slot.unsent > 0 {
            return None;
        }
        let cqe = slot.done.take()?;
        Some(self.release(index, cqe))
    }

    /// The controller has completed the command. Its completion is returned now, or by [`Self::payload_sent`] when some of
    /// its data still waits to be sent (a controller may fail a write before it has taken all its data).
    pub fn complete(&mut self, index: u16, mut cqe: Cqe) -> Option<Completion<In, Out>> {
        let slot = self.slot(index);
        if slot.digest_error {
            cqe.status = Status::TRANSIENT_TRANSPORT_ERROR.to_wire().into();
        }
        if slot.unsent > 0 {
            slot.done = Some(cqe);
            return None;
        }
        Some(self.release(index, cqe))
    }

    fn release(&mut self, index: u16, cqe: Cqe) -> Completion<In, Out> {
        let slot = self.slot(index);
        slot.busy = false;
        let data = std::mem::replace(&mut slot.data, Data::None);
        let token = slot.token;
        self.free.push(index);
        Completion { token, cqe, data }
    }

    /// Empties all slots. The transmit queue must have been cleared before: it names slots.
    pub fn take_all(&mut self) -> Vec<(u64, Data<In, Out>)> {
        let mut out = Vec::with_capacity(self.used());
        for (index, slot) in self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.busy) {
            slot.busy = false;
            slot.unsent = 0;
            slot.done = None;
            self.free.push(index as u16);
            out.push((slot.token, std::mem::replace(&mut slot.data, Data::None)));
        }
        out
    }
}
