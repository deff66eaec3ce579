//! Element types and operations, with their codes on the wire and in Python.

/// Defines an enumeration by a table of code and name. The codes are those on the wire, in C and in
/// Python; the names are those in messages, in C and in Python.
#[macro_export]
#[doc(hidden)]
macro_rules! coded_enum {
    ($(#[$meta:meta])* pub enum $name:ident {
        $($(#[$doc:meta])* $variant:ident = ($code:literal, $text:literal),)*
    }) => {
        $(#[$meta])*
        #[repr(u8)]
        pub enum $name {
            $($(#[$doc])* $variant = $code,)*
        }

        impl $name {
            /// All values, by code.
            pub const ALL: [Self; [$($code),*].len()] = [$(Self::$variant),*];

            /// The value with this code.
            #[inline]
            pub fn from_code(code: u8) -> Option<Self> {
                Self::ALL.get(usize::from(code)).copied()
            }

            /// The code on the wire.
            #[inline]
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// The name in messages.
            #[inline]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.name())
            }
        }

        // Codes are indices of `ALL`.
        const _: () = {
            let mut code = 0;
            while code < $name::ALL.len() {
                assert!($name::ALL[code] as usize == code);
                code += 1;
            }
        };
    };
}

coded_enum! {
    /// The type of the elements.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Dtype {
        /// IEEE binary32.
        F32 = (0, "float32"),
        /// The upper half of a binary32.
        Bf16 = (1, "bfloat16"),
        /// IEEE binary16.
        F16 = (2, "float16"),
        /// IEEE binary64.
        F64 = (3, "float64"),
        /// Signed, 32 bits.
        I32 = (4, "int32"),
        /// Signed, 64 bits.
        I64 = (5, "int64"),
        /// Unsigned, 8 bits.
        U8 = (6, "uint8"),
        /// Signed, 8 bits.
        I8 = (7, "int8"),
        /// 8 bits: 4 of exponent, 3 of fraction, no infinity ("fn": finite), largest 448.
        F8E4M3 = (8, "float8_e4m3fn"),
        /// 8 bits: 5 of exponent, 2 of fraction, with infinity: the upper half of a binary16.
        F8E5M2 = (9, "float8_e5m2"),
        /// Signed, 16 bits.
        I16 = (10, "int16"),
        /// Unsigned, 16 bits.
        U16 = (11, "uint16"),
        /// Unsigned, 32 bits.
        U32 = (12, "uint32"),
        /// Unsigned, 64 bits.
        U64 = (13, "uint64"),
    }
}

impl Dtype {
    /// Bytes of one element; also its alignment.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::Bf16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// True for the two 8-bit floating-point types.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }

    /// True for the types with a NaN.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64) || self.is_short_float()
    }

    /// True for the floating-point types that are combined in fp32 and rounded once.
    pub const fn is_short_float(self) -> bool {
        matches!(self, Self::Bf16 | Self::F16 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// The type that holds a partial result without further rounding: fp32 for the shorter floating-point
    /// types, otherwise the type itself.
    pub const fn wide(self) -> Self {
        if self.is_short_float() { Self::F32 } else { self }
    }
}

coded_enum! {
    /// The operation that combines two elements.
    ///
    /// An average is a sum with a divisor: see [`crate::Pass`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Op {
        /// Addition.
        Sum = (0, "sum"),
        /// Multiplication.
        Product = (1, "product"),
        /// Minimum.
        Min = (2, "min"),
        /// Maximum.
        Max = (3, "max"),
        /// Bitwise and; integers only.
        BitAnd = (4, "band"),
        /// Bitwise or; integers only.
        BitOr = (5, "bor"),
        /// Bitwise exclusive or; integers only.
        BitXor = (6, "bxor"),
    }
}

impl Op {
    /// True if the operation is defined for elements of `dtype`.
    pub const fn supports(self, dtype: Dtype) -> bool {
        !(dtype.is_float() && matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor))
    }
}
