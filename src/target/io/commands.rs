//! Parsing and checking of I/O commands: what each one says, whether it may be done, and the work it becomes (NVM 1.0, 3.2).
//!
//! Every field is judged here, before a buffer is taken or data is asked for.
#![forbid(unsafe_code)]

use super::buffers::{AfterData, Need};
use super::{Inline, IoQueue};
use crate::nvme::base::{NSID_ALL, SglKind, Sqe, nvm};
use crate::nvme::command::{Copy, DatasetManagement, DsmRange, ReadWrite};
use crate::nvme::status::Status;
use crate::target::connection::Connection;
use crate::target::job::{NamespaceRef, Work};

/// The most that one Copy command moves, and so one of its ranges, bytes (MCL and MSSRL).
pub const COPY_BYTES_MAX: u64 = 1 << 20;
/// The most ranges of one Copy command (MSRC).
pub const COPY_RANGES_MAX: u32 = 128;

impl IoQueue {
    pub(super) fn start(
        &mut self,
        conn: &mut Connection,
        sqe: &Sqe,
        cid: u16,
        inline: Inline<'_>,
    ) -> Result<(), Status> {
        if !inline.intact {
            return Err(Status::TRANSIENT_TRANSPORT_ERROR);
        }
        match sqe.opcode {
            nvm::READ => self.start_read(conn, sqe, cid),
            nvm::WRITE => self.start_write(conn, sqe, cid, inline),
            nvm::FLUSH => self.start_flush(sqe, cid),
            nvm::WRITE_ZEROES => self.start_write_zeroes(sqe, cid),
            nvm::DATASET_MANAGEMENT => self.start_dataset_management(conn, sqe, cid, inline),
            nvm::COMPARE => self.start_compare(conn, sqe, cid, inline),
            nvm::VERIFY => self.start_verify(conn, sqe, cid),
            nvm::COPY => self.start_copy(conn, sqe, cid, inline),
            // Write Uncorrectable too: a pointer to bad data would be damage to everybody else who reads it.
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    pub(super) fn start_read(&mut self, conn: &mut Connection, sqe: &Sqe, cid: u16) -> Result<(), Status> {
        let command = ReadWrite::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        let (offset, len) = self.transfer_range(&namespace, &command)?;
        match sqe.data_kind()? {
            SglKind::Transport if sqe.dptr.length.get() == len => {}
            SglKind::Transport => return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr()),
            _ => return Err(Status::SGL_TYPE_INVALID.with_dnr()),
        }
        let need = Need::Read { offset, len, fua: command.fua };
        self.start_with_buffer(conn, cid, namespace, need);
        Ok(())
    }

    pub(super) fn start_write(
        &mut self,
        conn: &mut Connection,
        sqe: &Sqe,
        cid: u16,
        inline: Inline<'_>,
    ) -> Result<(), Status> {
        let command = ReadWrite::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        let (offset, len) = self.transfer_range(&namespace, &command)?;
        if namespace.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let fua = self.must_be_durable(&namespace, command.fua);
        let then = AfterData::Write { offset, fua };
        self.start_with_host_data(conn, sqe, cid, namespace, len..=len, inline, then)
    }

    pub(super) fn start_flush(&mut self, sqe: &Sqe, cid: u16) -> Result<(), Status> {
        let nsid = sqe.nsid.get();
        let (namespace, others) = if nsid == NSID_ALL {
            // What one of them holds cannot be made durable by this path: the host must not believe that all is.
            if let Some(status) = self.namespaces.iter().flatten().find_map(|path| path.refusal) {
                return Err(status);
            }
            let mut all = self.namespaces.iter().flatten().cloned();
            match all.next() {
                Some(first) => (first, all.collect()),
                None => return Err(Status::SUCCESS),
            }
        } else {
            (self.namespace(nsid)?, Vec::new())
        };
        self.run(cid, namespace, Work::Flush { others });
        Ok(())
    }

    pub(super) fn start_write_zeroes(&mut self, sqe: &Sqe, cid: u16) -> Result<(), Status> {
        let command = ReadWrite::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        let range = namespace.byte_range(command.slba, command.blocks.into());
        let (offset, len) = range.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?;
        if namespace.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let fua = self.must_be_durable(&namespace, command.fua);
        self.run(cid, namespace, Work::WriteZeroes { offset, len, deallocate: command.deallocate, fua });
        Ok(())
    }

    pub(super) fn start_dataset_management(
        &mut self,
        conn: &mut Connection,
        sqe: &Sqe,
        cid: u16,
        inline: Inline<'_>,
    ) -> Result<(), Status> {
        let command = DatasetManagement::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        // The other attributes are hints that change nothing here.
        if !command.attributes.ad() {
            return Err(Status::SUCCESS);
        }
        if namespace.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        // Some hosts always send a full list, whatever the number of ranges.
        let range_len = size_of::<DsmRange>() as u32;
        let lengths = u32::from(command.ranges) * range_len..=256 * range_len;
        let then = AfterData::Deallocate { ranges: command.ranges };
        self.start_with_host_data(conn, sqe, cid, namespace, lengths, inline, then)
    }

    fn start_compare(
        &mut self,
        conn: &mut Connection,
        sqe: &Sqe,
        cid: u16,
        inline: Inline<'_>,
    ) -> Result<(), Status> {
        let command = ReadWrite::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        let (offset, len) = self.transfer_range(&namespace, &command)?;
        let then = AfterData::Compare { offset, fua: command.fua, scratch: None };
        self.start_with_host_data(conn, sqe, cid, namespace, len..=len, inline, then)
    }

    fn start_verify(&mut self, conn: &mut Connection, sqe: &Sqe, cid: u16) -> Result<(), Status> {
        let command = ReadWrite::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        // No data moves, so the transfer limit does not count (VSL is 0).
        let range = namespace.byte_range(command.slba, command.blocks.into());
        let (offset, len) = range.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?;
        self.start_with_buffer(conn, cid, namespace, Need::Verify { offset, len, fua: command.fua });
        Ok(())
    }

    fn start_copy(
        &mut self,
        conn: &mut Connection,
        sqe: &Sqe,
        cid: u16,
        inline: Inline<'_>,
    ) -> Result<(), Status> {
        let command = Copy::parse(sqe);
        let namespace = self.namespace(command.nsid)?;
        let entry = command.entry_len().ok_or(Status::INVALID_FIELD.with_dnr())?;
        if u32::from(command.ranges) > COPY_RANGES_MAX {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
        }
        if namespace.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        // As for Dataset Management, a list may be longer than the ranges that are meant.
        let lengths = u32::from(command.ranges) * entry..=256 * entry;
        self.start_with_host_data(conn, sqe, cid, namespace, lengths, inline, AfterData::Copy(command))
    }

    /// What a Copy needs once the list of its sources is here. All of it is checked before anything is copied.
    pub(super) fn check_copy(
        &self,
        namespace: &NamespaceRef,
        command: &Copy,
        list: &[u8],
    ) -> Result<Need, Status> {
        let limit = COPY_BYTES_MAX >> namespace.block_shift;
        let mut blocks = 0;
        let mut sources = Vec::with_capacity(command.ranges.into());
        for source in command.sources(list).ok_or(Status::DATA_SGL_LENGTH_INVALID.with_dnr())? {
            blocks += u64::from(source.blocks);
            if blocks > limit {
                return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
            }
            let range = namespace.byte_range(source.slba, source.blocks.into());
            sources.push(range.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?);
        }
        let range = namespace.byte_range(command.sdlba, blocks);
        let (to, len) = range.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?;
        let fua = self.must_be_durable(namespace, command.fua);
        Ok(Need::Copy { sources: sources.into(), to, len: len as u32, fua })
    }

    pub(super) fn namespace(&self, nsid: u32) -> Result<NamespaceRef, Status> {
        let found = nsid.checked_sub(1).and_then(|index| self.namespaces.get(index as usize));
        let path = found.and_then(Option::as_ref).ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
        match path.refusal {
            None => Ok(path.clone()),
            Some(status) => Err(status),
        }
    }

    /// Offset and length in bytes of a read or write, if it is within the namespace and the transfer limit.
    pub(super) fn transfer_range(
        &self,
        namespace: &NamespaceRef,
        command: &ReadWrite,
    ) -> Result<(u64, u32), Status> {
        let range = namespace.byte_range(command.slba, command.blocks.into());
        let (offset, len) = range.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?;
        if len > u64::from(self.max_io_size) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok((offset, len as u32))
    }

    /// A host that was not told of a write cache does not flush: everything it writes must be durable at once.
    pub(super) fn must_be_durable(&self, namespace: &NamespaceRef, fua: bool) -> bool {
        fua || (namespace.backend.has_write_cache() && self.controller.writes_through())
    }
}
