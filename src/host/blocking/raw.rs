//! Single PDUs over a blocking socket, right or wrong: what hostile and exact tests need.
//!
//! Nothing is checked on the way out. On the way in, PDUs are cut by their own PLEN and handed over with their digests
//! verified only where asked.
//!
//! ```no_run
//! use rimrock::host::blocking::{Pdu, RawConnection};
//! use rimrock::nvme::tcp::{Fes, R2t};
//! # use zerocopy::IntoBytes;
//! let mut raw = RawConnection::greeted("127.0.0.1:4420".parse()?)?;
//! raw.send(R2t::new(1, 1, 0, 4096).as_bytes())?;      // only controllers may send R2T
//! let (fes, _) = raw.expect_termination()?;
//! assert_eq!(fes, Fes::SEQUENCE_ERROR);
//! raw.expect_closed()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use zerocopy::{FromBytes, IntoBytes};

use super::{HostError, open_stream};
use crate::nvme::base::SglDescriptor;
use crate::nvme::fabrics::{
    CNTLID_DYNAMIC, Cc, ConnectAttributes, ConnectCommand, ConnectData, ConnectResult, Csts, PropertyCommand,
    property,
};
use crate::nvme::tcp::{
    C2hData, CapsuleCmd, CapsuleResp, CommonHeader, DIGEST_LEN, Digests, Fes, H2cData, IcReq, IcResp,
    PduShape, R2t, TermReq, flags, pdu,
};
use crate::nvme::{Cqe, Sqe};

/// The longest PDU that is read: a data PDU of the largest transfer that tests use, and then some.
const PLEN_MAX: usize = 64 << 20;

/// One PDU as it came.
#[derive(Debug, Clone)]
pub enum Pdu {
    IcResp(IcResp),
    CapsuleResp(CapsuleResp),
    C2hData {
        header: C2hData,
        data: Vec<u8>,
    },
    R2t(R2t),
    TermReq {
        header: TermReq,
        quoted: Vec<u8>,
    },
    /// A type that no controller sends, whole.
    Other(Vec<u8>),
}

/// A TCP connection to a target, with helpers that build and read PDUs.
pub struct RawConnection {
    stream: TcpStream,
    /// What ICResp granted; digests are added to what the helpers send.
    pub digests: Digests,
    /// CPDA of ICResp.
    pub cpda: u8,
    /// MAXH2CDATA of ICResp.
    pub max_h2c_data: u32,
    next_cid: u16,
}

/// An association whose admin queue is a [`RawConnection`].
pub struct RawAssociation {
    pub admin: RawConnection,
    pub cntlid: u16,
    pub hostid: [u8; 16],
    pub subnqn: String,
    pub hostnqn: String,
}

impl RawConnection {
    /// Connects TCP and sends nothing.
    pub fn open(addr: SocketAddr) -> Result<RawConnection, HostError> {
        Ok(RawConnection {
            stream: open_stream(addr)?,
            digests: Digests(0),
            cpda: 0,
            max_h2c_data: 0,
            next_cid: 0,
        })
    }

    /// Connects and exchanges ICReq and ICResp, without digests.
    pub fn greeted(addr: SocketAddr) -> Result<RawConnection, HostError> {
        let mut raw = RawConnection::open(addr)?;
        raw.greet(IcReq::new(0, Digests(0), 16))?;
        Ok(raw)
    }

    /// Sends this ICReq and takes the ICResp.
    pub fn greet(&mut self, request: IcReq) -> Result<IcResp, HostError> {
        self.send(request.as_bytes())?;
        match self.next_pdu()? {
            Pdu::IcResp(resp) => {
                self.digests = Digests(resp.dgst);
                self.cpda = resp.cpda;
                self.max_h2c_data = resp.maxh2cdata.get();
                Ok(resp)
            }
            _ => Err(HostError::Nonsense { what: "the answer to ICReq is not ICResp" }),
        }
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// How long to wait for bytes; the default is [`super::TIMEOUT_DEFAULT`].
    pub fn set_timeout(&self, timeout: Duration) -> Result<(), HostError> {
        Ok(self.stream.set_read_timeout(Some(timeout))?)
    }

    /// These bytes, as they are.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), HostError> {
        Ok(self.stream.write_all(bytes)?)
    }

    /// Ends the sending direction; the target sees end of file.
    pub fn finish_sending(&self) -> Result<(), HostError> {
        Ok(self.stream.shutdown(Shutdown::Write)?)
    }

    /// A command identifier that this connection has not used lately.
    pub fn new_cid(&mut self) -> u16 {
        self.next_cid = (self.next_cid + 1) % 0xFFFF;
        self.next_cid
    }

    /// A command capsule with its command as it is (identifier and data pointer too) and `data` behind it.
    pub fn send_capsule(&mut self, sqe: Sqe, data: &[u8]) -> Result<(), HostError> {
        let bytes = self.capsule_bytes(sqe, data);
        self.send(&bytes)
    }

    /// What [`RawConnection::send_capsule`] would send, to be changed first.
    pub fn capsule_bytes(&self, sqe: Sqe, data: &[u8]) -> Vec<u8> {
        let capsule = CapsuleCmd { ch: CommonHeader::bare(pdu::CAPSULE_CMD, size_of::<CapsuleCmd>()), sqe };
        self.pdu_bytes(capsule.as_bytes(), data)
    }

    /// H2CData with `data` for offset `datao`.
    pub fn send_h2c_data(
        &mut self,
        cccid: u16,
        ttag: u16,
        datao: u32,
        data: &[u8],
        last: bool,
    ) -> Result<(), HostError> {
        let bytes = self.h2c_data_bytes(cccid, ttag, datao, data, last);
        self.send(&bytes)
    }

    /// What [`RawConnection::send_h2c_data`] would send, to be changed first.
    pub fn h2c_data_bytes(&self, cccid: u16, ttag: u16, datao: u32, data: &[u8], last: bool) -> Vec<u8> {
        let mut ch = CommonHeader::bare(pdu::H2C_DATA, size_of::<H2cData>());
        if last {
            ch.flags |= flags::LAST_PDU;
        }
        let header = H2cData {
            ch,
            cccid: cccid.into(),
            ttag: ttag.into(),
            datao: datao.into(),
            datal: (data.len() as u32).into(),
            rsvd20: [0; 4],
        };
        self.pdu_bytes(header.as_bytes(), data)
    }

    /// A whole PDU from its header (PDO, PLEN and digest flags are filled in) and its data, with the digests in use.
    pub fn pdu_bytes(&self, header: &[u8], data: &[u8]) -> Vec<u8> {
        let shape = PduShape::new(header.len(), data.len(), self.digests, self.cpda);
        let mut bytes = header.to_vec();
        if let Ok((ch, _)) = CommonHeader::mut_from_prefix(&mut bytes) {
            shape.apply(ch);
        }
        if self.digests.header() {
            bytes.extend(crate::crc32c::crc32c(&bytes).to_le_bytes());
        }
        if !data.is_empty() {
            bytes.resize(shape.pdo, 0);
            bytes.extend(data);
            if self.digests.data() {
                bytes.extend(crate::crc32c::crc32c(data).to_le_bytes());
            }
        }
        bytes
    }

    /// The next PDU from the target. `HostError::Closed` at the end of the stream, `Timeout` when nothing comes.
    pub fn next_pdu(&mut self) -> Result<Pdu, HostError> {
        let bytes = self.next_pdu_bytes()?;
        let Ok((ch, _)) = CommonHeader::read_from_prefix(&bytes) else {
            return Err(HostError::Nonsense { what: "a PDU without a common header" });
        };
        let parsed = match ch.pdu_type {
            pdu::IC_RESP => IcResp::read_from_prefix(&bytes).ok().map(|(h, _)| Pdu::IcResp(h)),
            pdu::CAPSULE_RESP => CapsuleResp::read_from_prefix(&bytes).ok().map(|(h, _)| Pdu::CapsuleResp(h)),
            pdu::R2T => R2t::read_from_prefix(&bytes).ok().map(|(h, _)| Pdu::R2t(h)),
            pdu::C2H_TERM_REQ => TermReq::read_from_prefix(&bytes)
                .ok()
                .map(|(header, quoted)| Pdu::TermReq { header, quoted: quoted.to_vec() }),
            pdu::C2H_DATA => C2hData::read_from_prefix(&bytes).ok().and_then(|(header, _)| {
                let start = usize::from(ch.pdo);
                let data = bytes.get(start..start + header.datal.get() as usize)?.to_vec();
                if ch.has(flags::DDGSTF) {
                    let digest = bytes.get(start + data.len()..)?.first_chunk::<DIGEST_LEN>()?;
                    (u32::from_le_bytes(*digest) == crate::crc32c::crc32c(&data)).then_some(())?;
                }
                Some(Pdu::C2hData { header, data })
            }),
            _ => Some(Pdu::Other(bytes.clone())),
        };
        parsed.ok_or(HostError::Nonsense { what: "a PDU whose lengths or data digest do not fit" })
    }

    /// The bytes of the next PDU, whatever it is.
    pub fn next_pdu_bytes(&mut self) -> Result<Vec<u8>, HostError> {
        let mut bytes = vec![0; size_of::<CommonHeader>()];
        self.read_exact(&mut bytes)?;
        let plen = match CommonHeader::ref_from_bytes(&bytes) {
            Ok(ch) => ch.plen.get() as usize,
            Err(_) => 0,
        };
        if plen < bytes.len() || plen > PLEN_MAX {
            return Err(HostError::Nonsense { what: "a PDU of an impossible length" });
        }
        let read = bytes.len();
        bytes.resize(plen, 0);
        self.read_exact(&mut bytes[read..])?;
        Ok(bytes)
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), HostError> {
        self.stream.read_exact(buf).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                HostError::Closed
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let timeout = self.stream.read_timeout().ok().flatten().unwrap_or_default();
                HostError::Timeout { ms: timeout.as_millis() as u64 }
            }
            _ => error.into(),
        })
    }

    /// Sends a command without data, or with `data` in its capsule, under a fresh identifier, and waits for its response
    /// capsule; everything that comes in between is dropped.
    pub fn command(&mut self, mut sqe: Sqe, data: &[u8]) -> Result<Cqe, HostError> {
        let cid = self.new_cid();
        sqe.cid = cid.into();
        if !data.is_empty() {
            sqe.dptr = SglDescriptor::in_capsule(0, data.len() as u32);
        }
        self.send_capsule(sqe, data)?;
        self.response_to(cid)
    }

    /// Sends a command that returns `len` bytes of data; its data and status. The SUCCESS flag counts as a response.
    pub fn read_command(&mut self, mut sqe: Sqe, len: u32) -> Result<(Cqe, Vec<u8>), HostError> {
        let cid = self.new_cid();
        sqe.cid = cid.into();
        sqe.dptr = SglDescriptor::transport(len);
        self.send_capsule(sqe, &[])?;
        let mut received = Vec::new();
        loop {
            match self.next_pdu()? {
                Pdu::C2hData { header, data } if header.cccid.get() == cid => {
                    received.extend(data);
                    if header.ch.has(flags::SUCCESS) {
                        return Ok((Cqe::new(cid, crate::nvme::Status::SUCCESS), received));
                    }
                }
                Pdu::CapsuleResp(resp) if resp.cqe.cid.get() == cid => return Ok((resp.cqe, received)),
                Pdu::TermReq { header, .. } => return Err(terminated(&header)),
                _ => {}
            }
        }
    }

    /// Waits for the response capsule of command `cid`; everything else is dropped, a termination request is an error.
    pub fn response_to(&mut self, cid: u16) -> Result<Cqe, HostError> {
        loop {
            match self.next_pdu()? {
                Pdu::CapsuleResp(resp) if resp.cqe.cid.get() == cid => return Ok(resp.cqe),
                Pdu::TermReq { header, .. } => return Err(terminated(&header)),
                _ => {}
            }
        }
    }

    /// Waits for a termination request; everything else is dropped. Its status and information.
    pub fn expect_termination(&mut self) -> Result<(Fes, u32), HostError> {
        loop {
            if let Pdu::TermReq { header, .. } = self.next_pdu()? {
                return Ok((Fes(header.fes.get()), header.fei.get()));
            }
        }
    }

    /// Waits until the target has closed the connection; PDUs that still come are dropped.
    pub fn expect_closed(&mut self) -> Result<(), HostError> {
        let mut sink = [0; 4096];
        loop {
            match self.stream.read(&mut sink) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => {
                    return Ok(());
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(HostError::Timeout { ms: 0 });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connect with this command and data, in the capsule.
    pub fn connect_queue(&mut self, command: ConnectCommand, data: &ConnectData) -> Result<Cqe, HostError> {
        self.command(command.to_sqe(), data.as_bytes())
    }

    pub fn property_get(&mut self, offset: u32) -> Result<Cqe, HostError> {
        self.command(PropertyCommand::get(offset).to_sqe(), &[])
    }

    pub fn property_set(&mut self, offset: u32, value: u64) -> Result<Cqe, HostError> {
        self.command(PropertyCommand::set(offset, value).to_sqe(), &[])
    }

    /// Sets CC.EN and waits up to ten seconds for CSTS.RDY.
    pub fn enable(&mut self) -> Result<(), HostError> {
        const LIMIT_MS: u64 = 10_000;
        let cqe = self.property_set(property::CC, Cc::ENABLE.0.into())?;
        cqe.status().ok().map_err(|status| HostError::Status { command: "Property Set", status })?;
        for _ in 0..LIMIT_MS {
            if Csts(self.property_get(property::CSTS)?.dw0.get()).rdy() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(HostError::NotReady { wanted: "ready", ms: LIMIT_MS })
    }
}

impl RawAssociation {
    /// TCP, ICReq, Connect of the admin queue, CC.EN, CSTS.RDY.
    pub fn connect(
        addr: SocketAddr,
        subnqn: &str,
        hostnqn: &str,
        hostid: [u8; 16],
    ) -> Result<RawAssociation, HostError> {
        let mut admin = RawConnection::greeted(addr)?;
        let command = ConnectCommand::new(0, 32, ConnectAttributes(0), 0);
        let data = ConnectData::new(hostid, CNTLID_DYNAMIC, subnqn, hostnqn);
        let cntlid = connect_result(0, admin.connect_queue(command, &data)?)?;
        admin.enable()?;
        Ok(RawAssociation { admin, cntlid, hostid, subnqn: subnqn.into(), hostnqn: hostnqn.into() })
    }

    /// An I/O queue of `entries` entries on a new connection.
    pub fn io_queue(&self, addr: SocketAddr, qid: u16, entries: u16) -> Result<RawConnection, HostError> {
        let mut queue = RawConnection::greeted(addr)?;
        self.connect_io(&mut queue, qid, entries)?;
        Ok(queue)
    }

    /// Connect of an I/O queue on a connection that has been greeted.
    pub fn connect_io(&self, queue: &mut RawConnection, qid: u16, entries: u16) -> Result<(), HostError> {
        let attributes = ConnectAttributes(0).with_disable_sq_flow_control(true);
        let command = ConnectCommand::new(qid, entries, attributes, 0);
        let data = ConnectData::new(self.hostid, self.cntlid, &self.subnqn, &self.hostnqn);
        connect_result(qid, queue.connect_queue(command, &data)?).map(drop)
    }
}

fn connect_result(qid: u16, cqe: Cqe) -> Result<u16, HostError> {
    if cqe.status().is_success() {
        return Ok(ConnectResult(cqe.dw0.get()).cntlid() as u16);
    }
    let refusal = crate::nvme::fabrics::ConnectRefusal(cqe.dw0.get());
    Err(HostError::ConnectRefused { qid, status: cqe.status(), refusal })
}

fn terminated(header: &TermReq) -> HostError {
    let (fes, fei) = (Fes(header.fes.get()), header.fei.get());
    HostError::Protocol(crate::host::ProtocolError::Terminated { fes, fei })
}
