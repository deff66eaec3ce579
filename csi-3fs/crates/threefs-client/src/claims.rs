//! Claims: which node may use a directory that only one node may use at a time.
//!
//! A claim is an extended attribute, "BEAT HOLDER", that its holder renews: each renewal counts the
//! beat up. It is changed only by compare-and-swap, and no clocks are compared: whoever wants
//! another's claim watches the beat stand still by his own clock, longer than its holder trusts a
//! renewal by his own, and then takes exactly the claim that he has watched.

use threefs_meta::{At, MetaChange, MetaError, MetaQuery, MetaReply, SetMode};

use crate::Client;
use crate::error::ClientError;

/// Where a claim is kept.
const ATTRIBUTE: &str = "user.threefs.claim";
/// Others may change it at the same moment, but not again and again.
const ATTEMPTS_MAX: u32 = 8;

/// Who may use a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// A node's name.
    pub holder: String,
    /// Counts its renewals, and goes on counting when it changes hands.
    pub beat: u64,
}

/// What a holder finds that renews its claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Its claim, renewed.
    Held(Claim),
    /// It is another's, or nobody's, or has been in between.
    Lost(Option<Claim>),
}

impl Claim {
    fn encode(&self) -> Vec<u8> {
        format!("{} {}", self.beat, self.holder).into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (beat, holder) = std::str::from_utf8(bytes).ok()?.split_once(' ')?;
        Some(Self { holder: holder.into(), beat: beat.parse().ok()? })
    }
}

impl Client {
    /// The claim on a directory.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn claim_of(&self, path: &str) -> Result<Option<Claim>, ClientError> {
        let query = MetaQuery::GetAttribute { at: At::path(path), name: ATTRIBUTE.into() };
        let what = format!("read the claim on `{path}`");
        match self.0.claims.query(&what, query, self.deadline()).await {
            Ok(MetaReply::Attribute(value)) => {
                Claim::decode(&value).map(Some).ok_or_else(|| ClientError::InvalidArgument {
                    detail: format!(
                        "attribute {ATTRIBUTE} of `{path}` is {:?}; it is 3FS's own: remove it",
                        String::from_utf8_lossy(&value)
                    ),
                })
            }
            Ok(other) => Err(ClientError::unexpected("meta", &other)),
            Err(ClientError::Meta(MetaError::NoAttribute { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes or renews the claim on a directory for `holder`; another's is taken only if it is
    /// exactly what has stood still. Gives the claim as it is now: whose it is, the caller looks.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn claim(
        &self,
        path: &str,
        holder: &str,
        stood_still: Option<&Claim>,
    ) -> Result<Claim, ClientError> {
        let mut attempts = 0;
        loop {
            let found = self.claim_of(path).await?;
            let (beat, mode) = match &found {
                None => (0, SetMode::Create),
                Some(claim) if claim.holder == holder || Some(claim) == stood_still => {
                    (claim.beat, SetMode::Was(claim.encode()))
                }
                Some(claim) => return Ok(claim.clone()),
            };
            let mine = Claim { holder: holder.into(), beat: beat + 1 };
            match self.write_claim(path, Some(&mine), mode).await {
                Ok(()) => return Ok(mine),
                Err(ClientError::Meta(
                    MetaError::Exists { .. } | MetaError::NoAttribute { .. },
                )) if attempts < ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
            attempts += 1;
        }
    }

    /// Renews a claim that its holder has, and never takes one: where it is gone, another may have
    /// had it and given it back. A beat below the known one tells the same.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn renew_claim(&self, path: &str, known: &Claim) -> Result<Renewal, ClientError> {
        let mut attempts = 0;
        loop {
            let found = match self.claim_of(path).await? {
                Some(found) if found.holder == known.holder && found.beat >= known.beat => found,
                other => return Ok(Renewal::Lost(other)),
            };
            let mine = Claim { holder: found.holder.clone(), beat: found.beat + 1 };
            match self.write_claim(path, Some(&mine), SetMode::Was(found.encode())).await {
                Ok(()) => return Ok(Renewal::Held(mine)),
                Err(ClientError::Meta(
                    MetaError::Exists { .. } | MetaError::NoAttribute { .. },
                )) if attempts < ATTEMPTS_MAX => {}
                Err(error) => return Err(error),
            }
            attempts += 1;
        }
    }

    /// Gives a claim back, if it is this holder's.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub async fn unclaim(&self, path: &str, holder: &str) -> Result<(), ClientError> {
        match self.claim_of(path).await? {
            Some(claim) if claim.holder == holder => {
                match self.write_claim(path, None, SetMode::Was(claim.encode())).await {
                    // Another's by now.
                    Err(ClientError::Meta(
                        MetaError::Exists { .. } | MetaError::NoAttribute { .. },
                    )) => Ok(()),
                    other => other,
                }
            }
            _ => Ok(()),
        }
    }

    async fn write_claim(
        &self,
        path: &str,
        claim: Option<&Claim>,
        mode: SetMode,
    ) -> Result<(), ClientError> {
        let value = claim.map(Claim::encode);
        let (at, name) = (At::path(path), ATTRIBUTE.into());
        let change = MetaChange::SetAttribute { at, name, value, mode };
        let what = format!("claim `{path}`");
        self.0.claims.change(&what, change, self.deadline()).await.map(drop)
    }
}
