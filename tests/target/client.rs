//! A host made of raw bytes: it lays out every PDU by hand, so that it shares no mistake with the code under test and can
//! send what no real host would. And a rig that starts a target to talk to.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rimrock::device::{Device, OpenOptions};
use rimrock::reactor::{ReactorConfig, ReactorHandle, Reactors, block_on};
use rimrock::target::{Backend, NamespaceSpec, SubsystemSpec, Target, TargetError};

pub const SUBNQN: &str = "nqn.2024-01.io.rimrock:test";
pub const HOSTNQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";
pub const OTHER_HOST: &str = "nqn.2024-01.org.example:other";
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
pub const HOSTID: [u8; 16] = [0x5A; 16];
/// Nothing on this machine takes that long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(10);

// ---- rig -----------------------------------------------------------------------------------------------------------

pub struct Rig {
    pub target: Target,
    pub addr: SocketAddr,
    pub device: Device,
    /// Last, so that everything else is gone when the reactors stop.
    reactors: Reactors,
}

impl Rig {
    /// A subsystem with namespace 1 on 64 MiB of memory in blocks of 4096 bytes, open to every host.
    pub fn start() -> Rig {
        Rig::with_device("ram:64MiB")
    }

    pub fn with_device(uri: &str) -> Rig {
        Rig::build(uri, |_| {})
    }

    pub fn build(uri: &str, configure: impl FnOnce(&Target)) -> Rig {
        let config = ReactorConfig { cores: vec![0, 1], ..ReactorConfig::default() };
        let reactors = Reactors::start(config).expect("reactors start");
        let target = Target::new(reactors.handles().to_vec());
        configure(&target);
        let device = Device::open(uri, OpenOptions::default()).expect("a ram device");
        let spec = SubsystemSpec { allow_any_host: true, ..SubsystemSpec::new(SUBNQN) };
        target.create_subsystem(spec).unwrap();
        let namespace = NamespaceSpec::new(Backend::Device(device.clone()), "ram");
        assert_eq!(target.add_namespace(SUBNQN, namespace).unwrap(), 1);
        let addr = listen(&target, SUBNQN);
        Rig { target, addr, device, reactors }
    }

    pub fn reactors(&self) -> Vec<ReactorHandle> {
        self.reactors.handles().to_vec()
    }

    /// A second host does I/O: the process is alive and others are not disturbed.
    pub fn check_health(&self) {
        let (_admin, mut io) = self.connect_as(OTHER_HOST, 16);
        // More than fits into any capsule.
        let data = pattern(12288, 99);
        assert!(io.write(1, 3, &data).ok());
        assert_eq!(io.read(1, 3, 12288).expect_ok(), data);
    }

    pub fn wire(&self) -> Wire {
        let mut wire = Wire::open(self.addr);
        wire.handshake();
        wire
    }

    pub fn admin(&self) -> Wire {
        self.admin_as(HOSTNQN)
    }

    pub fn admin_as(&self, host: &str) -> Wire {
        let mut admin = self.wire();
        admin.connect_admin(SUBNQN, host).expect_ok();
        admin.enable();
        admin
    }

    /// An admin queue and an I/O queue of a host.
    pub fn connect(&self) -> (Wire, Wire) {
        self.connect_as(HOSTNQN, 128)
    }

    pub fn connect_as(&self, host: &str, entries: u16) -> (Wire, Wire) {
        let admin = self.admin_as(host);
        let mut io = self.wire();
        io.connect_io(&admin, host, 1, entries).expect_ok();
        (admin, io)
    }

    /// Calls something asynchronous of the target, which must succeed.
    pub fn ask<F, Fut>(&self, call: F)
    where
        F: FnOnce(Target, SocketAddr) -> Fut,
        Fut: Future<Output = Result<(), TargetError>> + 'static,
    {
        let call = call(self.target.clone(), self.addr);
        block_on(call).unwrap();
    }

    /// Waits until the target has as many connections as `count`.
    pub fn await_connections(&self, count: u32) {
        let deadline = Instant::now() + PATIENCE;
        while self.target.connection_count() != count {
            assert!(
                Instant::now() < deadline,
                "{} connections, expected {count}",
                self.target.connection_count()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Listens on a free port of 127.0.0.1.
pub fn listen(target: &Target, nqn: &str) -> SocketAddr {
    for _ in 0..100 {
        // A port that was free a moment ago; somebody may be quicker.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        let (target, nqn) = (target.clone(), nqn.to_owned());
        if block_on(async move { target.add_listener(&nqn, addr).await }).is_ok() {
            return addr;
        }
    }
    panic!("no port to listen on");
}

/// Bytes that depend on position and seed.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

// ---- commands ------------------------------------------------------------------------------------------------------

pub const IDENTIFY: u8 = 0x06;
pub const FABRICS: u8 = 0x7F;
pub const IN_CAPSULE: u8 = 0x01;
pub const TRANSPORT: u8 = 0x5A;

/// A submission queue entry.
#[derive(Clone, Copy)]
pub struct Sqe(pub [u8; 64]);

impl Sqe {
    pub fn new(opcode: u8, nsid: u32) -> Sqe {
        let mut sqe = Sqe([0; 64]);
        sqe.0[0] = opcode;
        sqe.0[1] = 0x40;
        sqe.dword(1, nsid)
    }

    pub fn fabrics(fctype: u8) -> Sqe {
        Sqe::new(FABRICS, fctype.into())
    }

    pub fn dword(mut self, index: usize, value: u32) -> Sqe {
        self.0[index * 4..][..4].copy_from_slice(&value.to_le_bytes());
        self
    }

    pub fn cid(mut self, cid: u16) -> Sqe {
        self.0[2..4].copy_from_slice(&cid.to_le_bytes());
        self
    }

    pub fn sgl(mut self, kind: u8, len: u32) -> Sqe {
        self.0[24..40].fill(0);
        self.0[32..36].copy_from_slice(&len.to_le_bytes());
        self.0[39] = kind;
        self
    }

    /// Read (02h), Write (01h), Write Zeroes (08h): `nlb` is 0's based.
    pub fn rw(opcode: u8, nsid: u32, slba: u64, nlb: u32) -> Sqe {
        Sqe::new(opcode, nsid).dword(10, slba as u32).dword(11, (slba >> 32) as u32).dword(12, nlb)
    }
}

/// A completion, with the data that came before it.
#[derive(Debug)]
pub struct Completion {
    pub result: u64,
    pub sqhd: u16,
    pub cid: u16,
    pub status: u16,
    pub data: Vec<u8>,
}

impl Completion {
    /// Status Code Type and Status Code, as SCT << 8 | SC.
    pub fn code(&self) -> u16 {
        (self.status >> 1) & 0x7FF
    }

    pub fn dnr(&self) -> bool {
        self.status & 0x8000 != 0
    }

    pub fn ok(&self) -> bool {
        self.code() == 0
    }

    #[track_caller]
    pub fn expect_ok(self) -> Vec<u8> {
        assert!(
            self.ok(),
            "status {:X}/{:02X}, result {:#x}",
            self.code() >> 8,
            self.code() & 0xFF,
            self.result
        );
        self.data
    }

    /// Fails with this status, Do Not Retry included.
    #[track_caller]
    pub fn expect_refused(self, code: u16) {
        assert_eq!(
            self.code(),
            code,
            "status {:03X}, expected {code:03X}, result {:#x}",
            self.code(),
            self.result
        );
        assert!(self.dnr(), "status {code:03X} must say do not retry");
    }
}

// ---- the wire ------------------------------------------------------------------------------------------------------

#[derive(Debug, Clone)]
pub struct Pdu {
    pub bytes: Vec<u8>,
}

impl Pdu {
    pub fn kind(&self) -> u8 {
        self.bytes[0]
    }

    pub fn flags(&self) -> u8 {
        self.bytes[1]
    }

    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes[at..at + 2].try_into().unwrap())
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    pub fn data(&self) -> &[u8] {
        let pdo = usize::from(self.bytes[3]);
        let digest = if self.flags() & 2 != 0 { 4 } else { 0 };
        if pdo == 0 { &[] } else { &self.bytes[pdo..self.bytes.len() - digest] }
    }

    pub fn completion(&self, data: Vec<u8>) -> Completion {
        assert_eq!(
            self.kind(),
            5,
            "expected a response, got {:02x?}",
            &self.bytes[..self.bytes.len().min(32)]
        );
        Completion {
            result: u64::from_le_bytes(self.bytes[8..16].try_into().unwrap()),
            sqhd: self.u16(16),
            cid: self.u16(20),
            status: self.u16(22),
            data,
        }
    }
}

pub struct Wire {
    pub stream: TcpStream,
    pub header_digest: bool,
    pub data_digest: bool,
    pub maxh2cdata: u32,
    pub cntlid: u16,
    next_cid: u16,
}

impl Wire {
    pub fn open(addr: SocketAddr) -> Wire {
        let stream = TcpStream::connect(addr).expect("the target listens");
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Wire { stream, header_digest: false, data_digest: false, maxh2cdata: 0, cntlid: 0xFFFF, next_cid: 0 }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the connection is open");
    }

    /// The next PDU, `None` at the end of the connection.
    pub fn receive(&mut self) -> Option<Pdu> {
        let mut bytes = vec![0; 8];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => panic!("nothing came for {PATIENCE:?}"),
            Err(_) => return None,
        }
        let plen = u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize;
        assert!((8..=64 << 20).contains(&plen), "absurd PLEN {plen} in {bytes:02x?}");
        bytes.resize(plen, 0);
        self.stream.read_exact(&mut bytes[8..]).ok()?;
        let pdu = Pdu { bytes };
        self.check_digests(&pdu);
        Some(pdu)
    }

    fn check_digests(&self, pdu: &Pdu) {
        let hlen = usize::from(pdu.bytes[2]);
        if matches!(pdu.kind(), 5 | 7 | 9) {
            assert_eq!(pdu.flags() & 1 != 0, self.header_digest, "HDGSTF");
        }
        if pdu.flags() & 1 != 0 {
            assert_eq!(
                pdu.bytes[hlen..hlen + 4],
                crc32c::crc32c(&pdu.bytes[..hlen]).to_le_bytes(),
                "header digest"
            );
        }
        if pdu.flags() & 2 != 0 {
            let at = pdu.bytes.len() - 4;
            assert_eq!(pdu.bytes[at..], crc32c::crc32c(pdu.data()).to_le_bytes(), "data digest");
        }
    }

    #[track_caller]
    pub fn expect(&mut self, kind: u8) -> Pdu {
        let pdu = self.receive().expect("the connection is open");
        assert_eq!(pdu.kind(), kind, "PDU {:02x?}", &pdu.bytes[..pdu.bytes.len().min(32)]);
        pdu
    }

    /// The connection ends with a C2HTermReq; its FES and FEI.
    #[track_caller]
    pub fn expect_terminated(&mut self) -> (u16, u32) {
        loop {
            let Some(pdu) = self.receive() else {
                panic!("the connection ended without a termination request")
            };
            if pdu.kind() == 3 {
                assert!(self.receive().is_none(), "nothing may follow a termination request");
                return (pdu.u16(8), pdu.u32(10));
            }
        }
    }

    pub fn is_closed(&mut self) -> bool {
        loop {
            match self.receive() {
                None => return true,
                Some(pdu) if pdu.kind() == 3 => {}
                Some(_) => return false,
            }
        }
    }

    /// Closes the connection with a reset.
    pub fn reset(&mut self) {
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        nix::sys::socket::setsockopt(&self.stream, nix::sys::socket::sockopt::Linger, &linger).unwrap();
        let closed = TcpStream::connect(self.stream.peer_addr().unwrap()).unwrap();
        drop(std::mem::replace(&mut self.stream, closed));
    }

    pub fn ic_req(hpda: u8, dgst: u8) -> Vec<u8> {
        let mut pdu = vec![0; 128];
        pdu[2] = 128;
        pdu[4] = 128;
        pdu[10] = hpda;
        pdu[11] = dgst;
        pdu
    }

    pub fn handshake(&mut self) {
        self.handshake_with(0, 0);
    }

    pub fn handshake_with(&mut self, hpda: u8, dgst: u8) {
        self.send(&Wire::ic_req(hpda, dgst));
        let pdu = self.expect(1);
        assert_eq!((pdu.bytes.len(), pdu.bytes[2], pdu.u16(8), pdu.bytes[11]), (128, 128, 0, dgst));
        self.maxh2cdata = pdu.u32(12);
        self.header_digest = dgst & 1 != 0;
        self.data_digest = dgst & 2 != 0;
    }

    /// The bytes of any PDU: a header without its first eight bytes, and data.
    pub fn pdu(&self, kind: u8, flags: u8, header: &[u8], data: &[u8]) -> Vec<u8> {
        let hlen = 8 + header.len();
        let mut pdu = vec![kind, flags, hlen as u8, 0, 0, 0, 0, 0];
        pdu.extend_from_slice(header);
        let head_digest = if self.header_digest { 4 } else { 0 };
        pdu[1] |= u8::from(self.header_digest);
        let mut plen = hlen + head_digest;
        if !data.is_empty() {
            pdu[3] = plen as u8;
            plen += data.len();
            if self.data_digest {
                pdu[1] |= 2;
                plen += 4;
            }
        }
        pdu[4..8].copy_from_slice(&(plen as u32).to_le_bytes());
        if self.header_digest {
            pdu.extend_from_slice(&crc32c::crc32c(&pdu[..hlen]).to_le_bytes());
        }
        pdu.extend_from_slice(data);
        if self.data_digest && !data.is_empty() {
            pdu.extend_from_slice(&crc32c::crc32c(data).to_le_bytes());
        }
        pdu
    }

    pub fn h2c_data(&self, cccid: u16, ttag: u16, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
        let mut header = [0; 16];
        header[0..2].copy_from_slice(&cccid.to_le_bytes());
        header[2..4].copy_from_slice(&ttag.to_le_bytes());
        header[4..8].copy_from_slice(&offset.to_le_bytes());
        header[8..12].copy_from_slice(&(data.len() as u32).to_le_bytes());
        self.pdu(6, if last { 4 } else { 0 }, &header, data)
    }

    pub fn next_cid(&mut self) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        self.next_cid
    }

    /// Sends a command with a fresh CID and returns that.
    pub fn submit(&mut self, sqe: Sqe, data: &[u8]) -> u16 {
        let cid = self.next_cid();
        let pdu = self.pdu(4, 0, &sqe.cid(cid).0, data);
        self.send(&pdu);
        cid
    }

    /// The next completion, with the data before it; R2Ts are answered with `outgoing` in PDUs of MAXH2CDATA.
    pub fn complete(&mut self, outgoing: &[u8]) -> Completion {
        let mut data = Vec::new();
        loop {
            let pdu = self.receive().expect("the connection is open");
            match pdu.kind() {
                7 => {
                    assert_eq!(pdu.u32(12) as usize, data.len(), "data comes in order");
                    assert_eq!(pdu.u32(16) as usize, pdu.data().len(), "DATAL");
                    data.extend_from_slice(pdu.data());
                    if pdu.flags() & 8 != 0 {
                        assert!(pdu.flags() & 4 != 0, "SUCCESS only with LAST_PDU");
                        return Completion { result: 0, sqhd: 0, cid: pdu.u16(8), status: 0, data };
                    }
                }
                9 => {
                    let (cid, ttag) = (pdu.u16(8), pdu.u16(10));
                    let (offset, len) = (pdu.u32(12) as usize, pdu.u32(16) as usize);
                    self.send_host_data(
                        cid,
                        ttag,
                        offset,
                        &outgoing[offset..offset + len],
                        self.maxh2cdata as usize,
                    );
                }
                _ => return pdu.completion(data),
            }
        }
    }

    pub fn send_host_data(&mut self, cid: u16, ttag: u16, offset: usize, data: &[u8], step: usize) {
        let mut at = 0;
        while at < data.len() {
            let len = step.min(data.len() - at);
            let pdu =
                self.h2c_data(cid, ttag, (offset + at) as u32, &data[at..at + len], at + len == data.len());
            self.send(&pdu);
            at += len;
        }
    }

    pub fn command(&mut self, sqe: Sqe, data: &[u8]) -> Completion {
        let cid = self.submit(sqe, data);
        let completion = self.complete(data);
        assert_eq!(completion.cid, cid);
        completion
    }

    /// A command that receives `len` bytes.
    pub fn get(&mut self, sqe: Sqe, len: u32) -> Completion {
        self.command(sqe.sgl(TRANSPORT, len), &[])
    }

    // ---- connect and properties ----

    pub fn connect_sqe(qid: u16, entries: u16, kato: u32) -> Sqe {
        Sqe::fabrics(1)
            .dword(10, u32::from(qid) << 16)
            .dword(11, u32::from(entries - 1))
            .dword(12, kato)
            .sgl(IN_CAPSULE, 1024)
    }

    pub fn connect_data(cntlid: u16, subnqn: &[u8], hostnqn: &[u8], hostid: [u8; 16]) -> Vec<u8> {
        let mut data = vec![0; 1024];
        data[..16].copy_from_slice(&hostid);
        data[16..18].copy_from_slice(&cntlid.to_le_bytes());
        data[256..256 + subnqn.len()].copy_from_slice(subnqn);
        data[512..512 + hostnqn.len()].copy_from_slice(hostnqn);
        data
    }

    pub fn connect_admin(&mut self, subnqn: &str, hostnqn: &str) -> Completion {
        let data = Wire::connect_data(0xFFFF, subnqn.as_bytes(), hostnqn.as_bytes(), HOSTID);
        let completion = self.command(Wire::connect_sqe(0, 32, 0), &data);
        self.cntlid = completion.result as u16;
        completion
    }

    pub fn connect_io(&mut self, admin: &Wire, hostnqn: &str, qid: u16, entries: u16) -> Completion {
        let data = Wire::connect_data(admin.cntlid, SUBNQN.as_bytes(), hostnqn.as_bytes(), HOSTID);
        self.command(Wire::connect_sqe(qid, entries, 0), &data)
    }

    pub fn property_get(&mut self, offset: u32, wide: bool) -> Completion {
        self.command(Sqe::fabrics(4).dword(10, u32::from(wide)).dword(11, offset), &[])
    }

    pub fn property_set(&mut self, offset: u32, value: u32) -> Completion {
        self.command(Sqe::fabrics(0).dword(11, offset).dword(12, value), &[])
    }

    pub fn enable(&mut self) {
        self.property_set(0x14, 0x0046_0001).expect_ok();
        assert_eq!(self.property_get(0x1C, false).result & 1, 1, "CSTS.RDY");
    }

    pub fn identify(&mut self, cns: u8, nsid: u32) -> Completion {
        self.get(Sqe::new(IDENTIFY, nsid).dword(10, cns.into()), 4096)
    }

    pub fn log_page(&mut self, lid: u8, offset: u64, len: u32, rae: bool) -> Completion {
        let numd = len / 4 - 1;
        let sqe = Sqe::new(0x02, 0xFFFF_FFFF)
            .dword(10, u32::from(lid) | u32::from(rae) << 15 | (numd & 0xFFFF) << 16)
            .dword(11, numd >> 16)
            .dword(12, offset as u32)
            .dword(13, (offset >> 32) as u32);
        self.get(sqe, len)
    }

    pub fn set_feature(&mut self, fid: u8, value: u32) -> Completion {
        self.command(Sqe::new(0x09, 0).dword(10, fid.into()).dword(11, value), &[])
    }

    pub fn get_feature(&mut self, fid: u8) -> Completion {
        self.command(Sqe::new(0x0A, 0).dword(10, fid.into()), &[])
    }

    // ---- I/O, in blocks of 4096 bytes ----

    pub fn read(&mut self, nsid: u32, slba: u64, len: u32) -> Completion {
        self.get(Sqe::rw(2, nsid, slba, len / 4096 - 1), len)
    }

    pub fn write(&mut self, nsid: u32, slba: u64, data: &[u8]) -> Completion {
        let kind = if data.len() <= 8192 { IN_CAPSULE } else { TRANSPORT };
        let sqe = Sqe::rw(1, nsid, slba, (data.len() / 4096) as u32 - 1).sgl(kind, data.len() as u32);
        if kind == IN_CAPSULE {
            return self.command(sqe, data);
        }
        let cid = self.submit(sqe, &[]);
        let completion = self.complete(data);
        assert_eq!(completion.cid, cid);
        completion
    }
}
