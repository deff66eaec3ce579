//! TLS 1.3 below remote calls: contexts, the channel binding, and named mismatches.
//!
//! The server creates its key when it binds its port. The key is a raw public key (RFC 7250) and
//! authenticates nothing: the client accepts any key. `crate::auth::handshake` authenticates both
//! sides; it runs inside TLS and covers the channel binding (`tls-exporter`, RFC 9266). A proxy
//! that terminates TLS between the two has two channels with different bindings, so it can forward
//! neither proof.
//!
//! Not used: certificates, session resumption, early data, versions before 1.3.

use std::sync::{Arc, OnceLock};

use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::crypto::{ring as suite, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, ClientConfig, DigitallySignedStruct, Error, PeerIncompatible, ServerConfig,
    SignatureScheme,
};

use crate::auth::credentials::Credentials;
use crate::auth::keys::Keys;

/// Length of a channel binding.
const BINDING_BYTES: usize = 32;
pub(crate) const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";
/// Server name that the client's context requires. It is neither sent nor verified.
const NAME: &str = "3fs.invalid";
/// Content type of a handshake record: the first byte that a TLS client sends.
pub(crate) const HANDSHAKE_RECORD: u8 = 0x16;
/// A fatal `protocol_version` alert: the reply to a peer that uses TLS where this side does not, or
/// the reverse.
pub(crate) const MISMATCH: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 70];
/// Bytes read from a peer before it has authenticated. A client hello, a finished message, and the
/// first message of our handshake with the longest ticket and a proof are 2 KiB.
pub(crate) const UNAUTHENTICATED_BYTES_MAX: usize = 8 << 10;

/// Connections that a service accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accepts {
    /// Connections without TLS.
    #[default]
    Plain,
    /// Connections with TLS.
    Tls,
    /// Both, while a cluster migrates from one to the other.
    Both,
}

impl Accepts {
    pub(crate) fn plain(self) -> bool {
        self != Self::Tls
    }

    pub(crate) fn tls(self) -> bool {
        self != Self::Plain
    }
}

/// The settings `tls` and `tls_transition` of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceTls {
    /// Connect to other services with TLS, and accept connections with TLS.
    pub enabled: bool,
    /// Accept connections with and without TLS.
    pub transition: bool,
}

impl ServiceTls {
    /// Connections that the service accepts.
    pub fn accepts(self) -> Accepts {
        match (self.transition, self.enabled) {
            (true, _) => Accepts::Both,
            (false, true) => Accepts::Tls,
            (false, false) => Accepts::Plain,
        }
    }

    /// Credentials that the service presents to other services.
    pub fn credentials(self, keys: &Keys) -> Credentials {
        Credentials::from(keys).over_tls(self.enabled)
    }
}

/// The context of the listening side, with a new key.
pub(crate) fn server_context() -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(provider());
    let key_error = |_| Error::General("generating a key failed".into());
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new())
        .map_err(key_error)?;
    let key = PrivatePkcs8KeyDer::from(pkcs8.as_ref().to_vec());
    let key = provider.key_provider.load_private_key(key.into())?;
    let public = key.public_key().ok_or(Error::General("the key has no public key".into()))?;
    let key = CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key);
    let mut context = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::new(key))));
    context.session_storage = Arc::new(NoServerSessionStorage {});
    context.send_tls13_tickets = 0;
    Ok(Arc::new(context))
}

/// The context of the connecting side, and its server name.
pub(crate) fn client_context() -> Result<(Arc<ClientConfig>, ServerName<'static>), Error> {
    static CONTEXT: OnceLock<Result<Arc<ClientConfig>, Error>> = OnceLock::new();
    let context = CONTEXT.get_or_init(|| {
        let provider = provider();
        let verifier = AnyKey(provider.signature_verification_algorithms);
        let mut context = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_no_client_auth();
        context.resumption = Resumption::disabled();
        context.enable_sni = false;
        Ok(Arc::new(context))
    });
    let name = ServerName::try_from(NAME).map_err(|error| Error::General(error.to_string()))?;
    Ok((context.clone()?, name))
}

/// One group and two ciphers, so that a hello is short and takes one round trip.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            suite::cipher_suite::TLS13_AES_128_GCM_SHA256,
            suite::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![suite::kx_group::X25519],
        ..suite::default_provider()
    }
}

/// The channel binding: identifies a TLS connection to its two ends only.
pub(crate) fn binding(
    connection: &tokio_rustls::TlsStream<impl Sized>,
) -> Result<[u8; BINDING_BYTES], Error> {
    let binding = [0; BINDING_BYTES];
    match connection {
        tokio_rustls::TlsStream::Client(stream) => {
            stream.get_ref().1.export_keying_material(binding, BINDING_LABEL, Some(&[]))
        }
        tokio_rustls::TlsStream::Server(stream) => {
            stream.get_ref().1.export_keying_material(binding, BINDING_LABEL, Some(&[]))
        }
    }
}

/// True if a failed TLS handshake shows that the service does not use TLS.
pub(crate) fn is_mismatch(error: &std::io::Error) -> bool {
    let source = error.get_ref().and_then(|source| source.downcast_ref::<Error>());
    matches!(source, Some(Error::AlertReceived(AlertDescription::ProtocolVersion)))
}

/// Accepts any raw public key whose holder signs the handshake. The module documentation explains
/// why.
#[derive(Debug)]
struct AnyKey(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _key: &CertificateDer<'_>,
        _chain: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
